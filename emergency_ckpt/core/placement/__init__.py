"""Placement: the shards that each process stores, and the survival of each choice. Pure.

1. ``placement_policies.place`` takes, for each group of equal leaves, the boxes that each process
   holds, and returns the shards that this process stores; every process computes it alone.
2. A ``PlacementPolicy`` is the choice: ``AllButPrimary``, or an extra such as ``extras.striped``.
3. ``placement_policies`` names the ``writers`` of the persistent tier, the shards that a restore
   keeps (``RetainedShards``), and the ``buddies`` on other slices that keep a copy of a host
   state.
4. ``study`` computes cost and survival of each policy for a given job.

Guaranteed: every box that any process holds is stored somewhere, on ``copies`` different slices
where that many have it; all processes compute the same placement from the same arguments.

Not guaranteed: equal bytes on every process where boxes differ in size; survival of a loss of more
than ``copies - 1`` slices.
"""
