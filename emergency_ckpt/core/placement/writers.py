"""The processes that write the persistent tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from emergency_ckpt.core.placement.placement_policies import Topology

PersistentWriters = Literal["primary", "striped"]
StorageCompression = Literal["none", "zstd"]
"""``primary``: the first slice writes. ``striped``: each slice writes a part of the one copy."""


def writers(topology: Topology, which: PersistentWriters = "primary") -> tuple[int, ...]:
    """Return the processes that write to storage on a save; the first one leads."""
    first, *others = topology.slices
    if which == "primary":
        return topology.members[first]
    return sum((topology.members[each] for each in others), topology.members[first])


def host_state_writer(owner: int, topology: Topology, members: Sequence[int]) -> int:
    """Return the writer that puts the host state of ``owner`` into the persistent tier."""
    if owner in members:
        return owner
    return members[topology.position(owner) % len(members)]


def owners_of(writer: int, topology: Topology, members: Sequence[int]) -> tuple[int, ...]:
    """Return the processes whose host states ``writer`` puts into the persistent tier."""
    every = range(topology.process_count)
    return tuple(owner for owner in every if host_state_writer(owner, topology, members) == writer)
