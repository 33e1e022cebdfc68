"""The restore coordinator: bring back the newest complete step on every process.

One restore:

1. Every process reports to the leader what its ramdisk holds (steps and digests of manifests) and a
   digest of the state that it wants. The leader reads each distinct manifest once.
2. ``core.restore.restore_plan`` chooses the newest step over both tiers that is whole in tensors
   and host state, a source and alternates for each shard of each process, and a reason for each
   newer step that it passes over. Where replicas differ (``core.restore.divergence``), the
   majority of the holders decides (``core.restore.majority``), and other copies are quarantined.
3. A persistent step comes in two phases. First all load it into RAM (``storage.load_plan``,
   ``storage.load``): each stored chunk is read by one process, spread over all slices, checked
   against the CRCs of capture time, and published. Then all report anew, and the restore continues
   as one from RAM and peers.
4. Each process verifies its own shards in place and hands their memory to JAX; nothing is copied on
   CPU. If anything must be fetched, all that the process keeps goes into one free slot: own shards
   copied, others received with their CRC on the way. What it does not keep goes into memory of its
   own (``restore.shards.room``). The slot is published under the identity of its origin, so the
   host is a holder again. A shard goes to the devices as soon as its own CRC is checked.
5. All report. A copy that failed is quarantined and the leader plans again, with a peer, an older
   step or the persistent tier. One verdict holds for all.
6. Host states are applied and pushed to the buddies. A new incarnation begins, leftovers newer than
   the restored step are forgotten, the slots are reserved, and one round reports all of it: no
   process trains while a peer could count on a leftover.

Guaranteed: one step for all processes; no byte that failed its CRC; no older step because a holder
or storage did not answer. Only an answer says something about a copy: another CRC, or "not held".
A holder that cannot be reached is asked again, after the others (``shards.holder_calls``), and at
the deadline it is an error that names it. ``StorageUnreachable`` likewise. Each stored step is
loaded at most twice.

``prefetch`` runs steps 1 to 5 in a thread of its own while the train step compiles, and leaves a
cache on each process: the placed arrays, with the save, the CRCs of the copies and the tree that
they were made of. ``restore`` reports and plans as ever. A process whose part of the plan is made
of the same, and whose RAM has all that it keeps, skips step 4; all else is as without a prefetch.
Hits need not agree: nothing in step 4 is collective. Any other plan releases the arrays before it
needs memory, and so does a save. A prefetch that failed leaves nothing. One that was cancelled
changes RAM no more (``RestoreRoom.check``), so a save waits for it only a moment."""
