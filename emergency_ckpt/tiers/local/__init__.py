"""The local tier: slots, manifests and host states of one process on its host's ramdisk.

1. ``tier.LocalTier.open`` claims a directory of the run, and scans it. A damaged file is
   quarantined with its reason, never used. ``process_files`` is how all read such a directory: this
   scan, ``eckpt serve`` (``read_only``) and the survey of ``eckpt ls``.
2. ``reserve`` makes two slots (preallocated files of one step each) or finds them.
3. ``begin_write`` chooses a slot without a step that must be kept (``slot_choice``), removes its
   manifest, and returns a ``SlotWriter``.
4. The writer copies the shards with their CRC32C, stages the manifest, and renames it into place:
   from then on the step counts on this process.
5. ``note_complete`` records that the step is complete on all processes; its predecessor's slot is
   then free.

Guaranteed: a crash at any instant leaves the previous step whole; a published slot is not changed;
memory lent to JAX is never written, also when its slot is not yet published (``LocalTier.lend``
counts the arrays with finalizers, and a third slot takes the place of a lent one).

Storage writes from a slot on loan, too (``SlotWriter.loan``), and may take hours:
``keeps_lent_for_storage`` says whether saves have slots enough meanwhile, and makes a spare one,
which then stays.

Not guaranteed: survival of the host, whose copies other slices hold; the bytes of a slot, which a
restore compares with the CRC32C of capture time."""
