"""Decisions of a restore: the step for all processes, and where each finds its part. Pure.

The input is an ``inventory``, the output one of ``plan_types``.

1. ``restore_plan`` drops unusable copies, with reasons, and goes through the saves of both tiers,
   newest first, down to the first that is complete in tensors and host states. Each newer save is
   reported with what it lacked. ``leaves`` compares what was saved with the expected state.
2. ``copies`` names the manifests and holders of the shards that a process needs, once for all
   processes with equal needs.
3. ``part`` is each process's own choice among these: its own RAM first, then the holders in turn.
4. ``divergence`` finds replicas that differ, and which of them all processes take.
5. For a step in storage, ``storage_read`` gives each process the chunks that it reads.

Guaranteed: shards and host states of one save only; no quarantined copy, and one content of each
shard; a rolled-back save only if the caller allows it; the same choice for any order of the
reports; no exception for values of the right types.

Not guaranteed: that a copy is intact or its holder reachable. A copy that fails is quarantined by
the caller, which chooses again.
"""
