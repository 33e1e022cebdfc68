"""Placement: the shards that each process stores. Pure.

A ``PlacementPolicy`` is the choice: ``AllButPrimary``, or an extra such as ``extras.striped``.

Guaranteed: every box that any process holds is stored somewhere, on ``copies`` different slices
where that many have it; all processes compute the same placement from the same arguments.

Not guaranteed: equal bytes on every process where boxes differ in size; survival of a loss of more
than ``copies - 1`` slices.
"""
