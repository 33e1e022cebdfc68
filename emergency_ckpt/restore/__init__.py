"""A restore: bring back the newest complete step on every process.

``restore`` is the protocol: read it first. ``resume``, above this folder, calls it.

1. ``request`` has the parts, the request and the result; ``rounds`` what processes tell others.
2. ``leader`` has the rule of the rounds, in process 0: ``core.restore`` chooses the step, again
   after each failure, until all are done. What RAM holds the leader asks by ``holders``.
3. ``storage_load`` reads a step in storage: each stored chunk is read by one process, and checked
   against the CRCs of capture time. A process reads its part into the slot that will have all that
   the process keeps (``cluster.loaded_part``). Then the step is restored as one in RAM.
4. ``shards`` verifies a process's own shards in place and hands their memory to JAX. The process
   itself chooses among the holders of what it lacks. If anything must be fetched, all that the
   process keeps goes into one free slot: own shards copied, others received with their CRC on the
   way. After a read from storage this is the slot that has the part. The slot is published under
   the identity of its origin, so the host is a holder again. What is written finds its place by
   ``room``. A shard goes to the devices as soon as its own CRC is checked.
5. ``host_state`` fetches, pushes and applies the non-tensor state.
6. ``steps`` lists, describes and removes the steps of both tiers.

Guaranteed: one step for all processes; no byte that failed its CRC; no older step because a holder
or storage did not answer. Only an answer says something about a copy: another CRC, or "not held".
A holder that cannot be reached is asked again, after the others, until nothing moves any more: an
error that names it. ``StorageUnreachable`` likewise. Each stored step is loaded at most twice.
"""
