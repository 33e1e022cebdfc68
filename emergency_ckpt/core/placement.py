"""Placement: which shards a process stores, and who keeps copies of its host state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.types import Box, ShardId


@dataclass(frozen=True)
class Topology:
    """Which slice each process belongs to.

    Attributes:
      process_count: number of processes of the job.
      slice_of: slice index of each process, by process index. Slices may differ in size.

    Raises:
      ConfigError: the two do not agree, or an index is negative.
    """

    process_count: int
    slice_of: tuple[int, ...]

    primary_slice = 0
    """The slice that writes the persistent tier."""

    def __post_init__(self) -> None:
        if self.process_count != len(self.slice_of) or self.process_count < 1:
            problem = f"a topology of {self.process_count} processes names the slices of"
            raise ConfigError([f"{problem} {len(self.slice_of)}"])
        if min(self.slice_of) < 0:
            raise ConfigError([f"slice indices must not be negative, got {min(self.slice_of)}"])

    @cached_property
    def members(self) -> Mapping[int, tuple[int, ...]]:
        """Process indices of each slice, in order. The place in this order is the position."""
        members: dict[int, list[int]] = {index: [] for index in sorted(set(self.slice_of))}
        for process, slice_index in enumerate(self.slice_of):
            members[slice_index].append(process)
        return {index: tuple(processes) for index, processes in members.items()}

    @property
    def slices(self) -> tuple[int, ...]:
        """All slice indices, sorted."""
        return tuple(self.members)

    def position(self, process: int) -> int:
        """Place of the process among the processes of its slice."""
        return self.members[self.slice_of[process]].index(process)


@dataclass(frozen=True)
class AllButPrimary:
    """Each shard on every slice but the primary, which is busy with the persistent tier.

    The primary slice stores a shard only where fewer than two other slices hold it: one copy
    would be none after a failure.
    """


@dataclass(frozen=True)
class Striped:
    """Each shard on ``copies`` of the slices. A later version implements it."""

    copies: int


PlacementPolicy = AllButPrimary | Striped


def parse_policy(text: str) -> PlacementPolicy:
    """``"all_but_primary"`` or ``"striped(<copies>)"``.

    Raises:
      ConfigError: anything else.
    """
    if text == "all_but_primary":
        return AllButPrimary()
    match = re.fullmatch(r"striped\(([1-9][0-9]{0,5})\)", text)
    if match:
        return Striped(int(match[1]))
    raise ConfigError([f"placement must be 'all_but_primary' or 'striped(<copies>)', got {text!r}"])


def place(
    policy: PlacementPolicy,
    topology: Topology,
    process: int,
    slices_holding: Mapping[ShardId, frozenset[int]],
) -> tuple[ShardId, ...]:
    """The shards that ``process`` stores, sorted.

    Args:
      slices_holding: the slices whose devices hold each shard, for the distinct shards on the
        devices of ``process`` (see ``slices_with_boxes``). Nothing else of the job is needed.

    Raises:
      ConfigError: the policy is not implemented yet.
    """
    match policy:
        case AllButPrimary():
            own = topology.slice_of[process]
            kept = [s for s, held in slices_holding.items() if _keeps(own, held)]
            return tuple(sorted(kept))
        case Striped():
            raise ConfigError([f"placement striped({policy.copies}) comes in a later version"])
        case _:
            assert_never(policy)


def _keeps(own_slice: int, slices_holding: frozenset[int]) -> bool:
    return own_slice != Topology.primary_slice or len(slices_holding - {own_slice}) < 2


def slices_with_boxes(
    topology: Topology, own: Iterable[Box], boxes: Iterable[tuple[int, Box]]
) -> dict[Box, frozenset[int]]:
    """For one leaf: the slices that hold each of the ``own`` boxes.

    Args:
      boxes: (process index, box) of every device of the job, in any order. Leaves of equal
        sharding and shape give equal answers, so a caller asks once for each such pair.
    """
    holding: dict[Box, set[int]] = {box: set() for box in own}
    slice_of = topology.slice_of
    for process, box in boxes:
        slices = holding.get(box)
        if slices is not None:
            slices.add(slice_of[process])
    return {box: frozenset(slices) for box, slices in holding.items()}


def buddies(process: int, topology: Topology, copies: int | None = None) -> tuple[int, ...]:
    """Processes on other slices that keep copies of this process's host state.

    One on each of the ``copies`` slices that follow its own (every other slice when None), at the
    same position, modulo the size of that slice. None at all in a job of one slice.
    """
    position = topology.position(process)
    chosen: list[int] = []
    for slice_index in _following(topology, topology.slice_of[process], copies):
        members = topology.members[slice_index]
        chosen.append(members[position % len(members)])
    return tuple(chosen)


def wards(process: int, topology: Topology, copies: int | None = None) -> tuple[int, ...]:
    """The inverse of ``buddies``: processes that push their host state here, sorted."""
    own = topology.slice_of[process]
    position, size = topology.position(process), len(topology.members[own])
    pushing: list[int] = []
    for slice_index, members in topology.members.items():
        if slice_index != own and own in _following(topology, slice_index, copies):
            pushing.extend(members[position::size])
    return tuple(sorted(pushing))


def _following(topology: Topology, own: int, copies: int | None) -> tuple[int, ...]:
    """Other slices in cyclic order after ``own``, at most ``copies`` of them."""
    slices = topology.slices
    place_of_own = slices.index(own)
    others = slices[place_of_own + 1 :] + slices[:place_of_own]
    return others if copies is None else others[: max(0, copies)]
