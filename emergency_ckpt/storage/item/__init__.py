"""The Orbax item with the arrays of a step, written through TensorStore.

Orbax's own handlers need ten times as long as the writes where there are thousands of arrays. Here
the work for each array is one open and one write. The files are those of Orbax's handler of
pytrees, and Orbax reads them.

1. ``state.item_state`` makes the arrays of the item from the shards, and the part of each that this
   process writes, as views of the host memory. ``state`` also makes the three JSON documents: the
   tree (``ItemTree``), the shardings, the arrays.
2. ``array_writes`` writes the parts into the process's own OCDBT database below the item, in few
   transactions, each of which is one commit of the database. When all writers have written, it
   merges their databases into that of the item.
3. ``objects`` writes the small files. A crash before the commit leaves a folder that does not
   count: data without a manifest, or the databases of some writers.

Guaranteed: values are neither copied nor changed, except values that are compressed or are not
contiguous in memory; data and databases are synced to the disk before they count, as by Orbax.

Not guaranteed: that nothing of a cancelled write reaches storage. A write that TensorStore has
begun may end later, in a folder that does not count.
"""
