"""The read-only survey of a job's checkpoints: ramdisks and a persistent directory, described.

1. ``places`` has what a person named: ramdisks, a directory, a run, a secret.
2. ``ramdisk`` reads the process directories of ramdisks.
3. ``survey`` reads the steps of the directory, puts both together, as steps of one kind, says what
   each lacks, and opens each.

Guaranteed: nothing is created, changed, renamed, removed or locked, so a job that runs is not
disturbed, and neither is one that starts; a file that is damaged, foreign or another user's is a
fault of its own, and everything else is still described; importing this package loads neither JAX
nor Orbax.

Not guaranteed: the CRC32Cs of the bytes, which only a check with ``--read-data`` reads; the parts
on hosts whose ramdisks were not given.
"""
