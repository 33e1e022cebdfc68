"""The Orbax item with the arrays of a step, written through TensorStore.

Orbax's own handlers work for each array: with thousands of them that takes ten times as long as
the writes. Here the work for each array is one open and one write. What is written is what Orbax's
handler of pytrees would write, and Orbax reads it.

1. ``state.item_state`` makes of the shards the arrays of the item, and the part of each that this
   process writes, as views of the host memory; ``state.ItemTree`` and beside it make the three JSON
   documents: the tree, the shardings, the arrays.
2. ``array_writes`` writes the parts into the process's own OCDBT database below the item, in few
   transactions, each of which is one commit of the database, and merges the databases of all
   writers into that of the item when all have written.
3. ``objects`` writes the small files. A crash before the commit leaves a folder that does not
   count: data without a manifest, or the databases of some writers.

Guaranteed: values are neither copied nor changed, but for those that are compressed or do not lie
together in memory; data and databases are synced to the disk before they count, as by Orbax.

Not guaranteed: that nothing of a cancelled write reaches storage. What TensorStore has begun may
end later, in a folder that does not count.
"""
