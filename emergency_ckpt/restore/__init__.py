"""A restore: bring back the newest complete step on every process.

``restore`` has the protocol, and is the file to read first. ``resume``, above this folder, calls
it.

1. ``request`` has the parts, the request and the result; ``rounds`` the messages of processes.
2. ``leader`` has the rule of the rounds, in process 0: ``core.restore`` chooses the step, again
   after each failure, until all are done. The leader reads manifests in RAM by ``holders``.
3. ``storage_load`` reads a step in storage: each stored chunk is read by one process, and checked
   against the CRCs of capture time. A process reads its part into the slot that will have all that
   the process keeps (``LoadedPart``). Then the step is restored as a step in RAM.
4. ``shards`` verifies a process's own shards in place and gives their memory to JAX. The process
   itself chooses among the holders of the shards that it lacks. If any shard must be fetched, all
   that the process keeps goes into one free slot: own shards are copied, others are received with
   their CRC on the way. After a read from storage this is the slot that has the part. The slot is
   published under the identity of its origin, so the host is a holder again. ``room`` finds the
   places to write to. A shard goes to the devices as soon as its own CRC is checked.
5. ``host_state`` fetches the non-tensor state, sends it to the buddies, and applies it.
6. ``steps`` lists, describes and removes the steps of both tiers.

Guaranteed: one step for all processes; no byte that failed its CRC; no older step because a holder
or storage did not answer. A copy counts as unusable only after an answer: another CRC, or "not
held". A holder that cannot be reached is asked again, after the others, until nothing moves any
more; then the restore ends with an error that names the holder. ``StorageUnreachable`` is the like
error for storage. Each stored step is loaded at most twice.
"""
