"""Decisions of a restore: the step, and the source of every shard for each process. Pure.

The input is an ``inventory``, the output one of ``plan_types``.

1. ``restore_plan`` drops unusable copies, with reasons, and goes through the saves of both tiers,
   newest first, down to the first that is complete in tensors and host states. Each newer save is
   reported with what it lacked. ``leaves`` compares what was saved with the expected state.
2. ``assignment`` draws each shard from the process's own RAM or from the holder with the fewest
   bytes to send; processes with equal needs are planned once.
3. ``divergence`` finds replicas that differ, and which of them all processes take.
4. For a step in storage, ``storage_read`` gives each process the chunks that it reads.

Guaranteed: shards and host states of one save only; no quarantined copy, and one content of each
shard; a rolled-back save only if the caller allows it; the same plan for any order of the reports;
no exception for values of the right types.

Not guaranteed: that a planned copy is intact or its holder reachable. A copy that fails is
quarantined by the caller, which plans again.
"""
