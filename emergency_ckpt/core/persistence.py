"""Who writes what into the persistent tier."""

from __future__ import annotations

from emergency_ckpt.core.placement import Topology


def writers(topology: Topology) -> tuple[int, ...]:
    """The processes of the primary slice: only they talk to storage on a save."""
    return topology.members[topology.slices[0]]


def scribe(owner: int, topology: Topology) -> int:
    """The writer that puts the host state of ``owner`` into the persistent tier."""
    members = writers(topology)
    if owner in members:
        return owner
    return members[topology.position(owner) % len(members)]


def owners_of(writer: int, topology: Topology) -> tuple[int, ...]:
    """The processes whose host states ``writer`` puts into the persistent tier, itself included."""
    every = range(topology.process_count)
    return tuple(owner for owner in every if scribe(owner, topology) == writer)
