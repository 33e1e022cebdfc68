"""Decisions of a restore: the step, and the source of every shard for each process. Pure.

1. ``candidates`` groups the reported inventories by save and drops unusable copies, with reasons.
2. ``majority`` settles replicas that differ; without a majority the caller decides.
3. ``restore_plan`` goes through the saves of both tiers, newest first, down to the first that is
   complete in tensors (``leaves``, ``assignment``) and host states (``host_state_plan``). Each
   newer save is reported with what it lacked.
4. ``assignment`` draws each shard from the process's own RAM or from the holder with the fewest
   bytes to send; ``shard_classes`` lets processes with equal needs be planned once.
5. For a step in storage, ``storage_read`` gives each process the chunks that it reads, and
   ``stored_leaves`` compares the stored arrays with the expected state.

Guaranteed: shards and host states of one save only; no quarantined or outvoted copy; a rolled-back
save only if the caller allows it; the same plan for any order of the reports; no exception for
values of the right types.

Not guaranteed: that a planned copy is intact or its holder reachable. A copy that fails is
quarantined by the caller, which plans again.
"""
