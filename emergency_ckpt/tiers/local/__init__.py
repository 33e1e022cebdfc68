"""The local tier: slots, manifests and host states of one process on its host's ramdisk.

A slot is a preallocated file that holds one step. Its manifest counts only once it is renamed into
place after the bytes are complete, so a crash at any instant leaves the previous step whole.

Guaranteed: no published slot is changed; memory lent to JAX is never written, also where its slot
is not published yet (``LocalTier.lend`` counts the arrays with finalizers, and a third slot takes
the place of a lent one). Not guaranteed: survival of the host. Other slices hold the copies."""
