"""Placement: the shards that each process stores, and the writers of the persistent tier. Pure.

A ``PlacementPolicy`` is the choice: ``AllButPrimary``, or an extra such as ``extras.striped``.

Guaranteed: every box that any process holds is stored somewhere, on ``copies`` different slices
where that many have it; all processes compute the same placement from the same arguments.

Not guaranteed: equal bytes on every process where boxes differ in size; survival of a loss of more
than ``copies - 1`` slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

from emergency_ckpt.core.boxes import intersect, volume
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.types import Box, ShardId


@dataclass(frozen=True)
class Topology:
    """The slice of each process.

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
        """Process indices of each slice, in order. The index in this order is the position."""
        members: dict[int, list[int]] = {index: [] for index in sorted(set(self.slice_of))}
        for process, slice_index in enumerate(self.slice_of):
            members[slice_index].append(process)
        return {index: tuple(processes) for index, processes in members.items()}

    @property
    def slices(self) -> tuple[int, ...]:
        """All slice indices, sorted."""
        return tuple(self.members)

    @property
    def writers(self) -> tuple[int, ...]:
        """The processes that write to storage on a save: those of the first slice. One leads."""
        return self.members[self.slices[0]]

    def position(self, process: int) -> int:
        """Return the index of the process among the processes of its slice."""
        return self.members[self.slice_of[process]].index(process)


Holders = tuple[int, ...]
"""Processes whose devices hold a box, sorted."""


@dataclass(frozen=True)
class HeldLeaves:
    """Leaves of one shape that are sharded alike over the job.

    Attributes:
      shape: of the whole arrays.
      item_bytes: bytes of one element, by leaf path.
      holders: processes that hold each distinct box.
    """

    shape: tuple[int, ...]
    item_bytes: Mapping[str, int]
    holders: Mapping[Box, Holders]


@runtime_checkable
class PlacementPolicy(Protocol):
    """A rule that chooses, for each shard, the processes that store it. Pure.

    Every process computes the same answer from the same arguments.

    Attributes:
      copies: number of slices that store each shard; None: as many as hold it, but for the primary.
    """

    @property
    def copies(self) -> int | None: ...

    def stored_by(
        self, topology: Topology, processes: Collection[int], held: Sequence[HeldLeaves]
    ) -> Mapping[int, Sequence[ShardId]]:
        """Return the shards that each of ``processes`` stores, in any order.

        Together all processes must store every box that any of them holds. The result may have
        other processes too.
        """
        ...

    def copies_of(
        self, topology: Topology, leaves: HeldLeaves, holders: Holders
    ) -> Mapping[str, int]:
        """Return how many processes store a box that ``holders`` hold, by leaf path."""
        ...


@dataclass(frozen=True)
class AllButPrimary:
    """Each shard is stored on every slice but the primary, which writes the persistent tier.

    The primary slice stores a shard only where fewer than two other slices hold it, because a
    single copy would not survive a failure.
    """

    @property
    def copies(self) -> None:
        """None: as many as hold the shard."""

    def stored_by(
        self, topology: Topology, processes: Collection[int], held: Sequence[HeldLeaves]
    ) -> Mapping[int, Sequence[ShardId]]:
        """As ``PlacementPolicy``."""
        stored: dict[int, list[ShardId]] = {}
        among = frozenset(processes)
        for leaves in held:
            for box, holders in leaves.holders.items():
                if not (asked := among.intersection(holders)):
                    continue
                shards = [ShardId(path, box) for path in leaves.item_bytes]
                slices = slices_of(topology, holders)
                for process in asked:
                    if self._stores(topology, process, slices):
                        stored.setdefault(process, []).extend(shards)
        return stored

    def copies_of(
        self, topology: Topology, leaves: HeldLeaves, holders: Holders
    ) -> Mapping[str, int]:
        """As ``PlacementPolicy``."""
        slices = slices_of(topology, holders)
        copies = sum(self._stores(topology, process, slices) for process in holders)
        return dict.fromkeys(leaves.item_bytes, copies)

    def _stores(self, topology: Topology, process: int, slices: Collection[int]) -> bool:
        return topology.slice_of[process] != topology.primary_slice or len(slices) < 3


ALL_BUT_PRIMARY = "all_but_primary"


def place(
    policy: PlacementPolicy, topology: Topology, process: int, held_leaves: Sequence[HeldLeaves]
) -> tuple[ShardId, ...]:
    """Return the shards that ``process`` stores, sorted.

    All processes must give the same ``held_leaves``. Together the processes store every box that
    any of them holds.
    """
    return place_on(policy, topology, {process}, held_leaves)[process]


def place_on(
    policy: PlacementPolicy,
    topology: Topology,
    processes: Collection[int],
    held_leaves: Sequence[HeldLeaves],
) -> dict[int, tuple[ShardId, ...]]:
    """Return ``place`` of each of ``processes``, with less work than one call for each."""
    stored = policy.stored_by(topology, processes, held_leaves)
    return {process: tuple(sorted(stored.get(process, ()))) for process in processes}


class SingleCopies(NamedTuple):
    """The parts of a state that one process alone keeps in RAM; ``leaf``: one that has some."""

    nbytes: int
    total_bytes: int
    leaf: str


def single_copies(
    policy: PlacementPolicy, topology: Topology, held_leaves: Iterable[HeldLeaves]
) -> SingleCopies:
    """Return the bytes of the parts of which ``place`` keeps one copy on all processes together."""
    once = total = 0
    leaf = ""
    for leaves in held_leaves:
        for box, holders in leaves.holders.items():
            elements = volume(box)
            total += elements * sum(leaves.item_bytes.values())
            for path, copies in policy.copies_of(topology, leaves, holders).items():
                nbytes = elements * leaves.item_bytes[path]
                if copies == 1 and nbytes:
                    once += nbytes
                    leaf = min(leaf or path, path)
    return SingleCopies(once, total, leaf)


def replicated_bytes(topology: Topology, held_leaves: Iterable[HeldLeaves]) -> tuple[int, int]:
    """Return the bytes of the parts of a state that every slice holds, and those of all parts."""
    replicated = total = 0
    for leaves in held_leaves:
        for box, holders in leaves.holders.items():
            nbytes = volume(box) * sum(leaves.item_bytes.values())
            total += nbytes
            if len(slices_of(topology, holders)) == len(topology.slices):
                replicated += nbytes
    return replicated, total


def slices_of(topology: Topology, processes: Iterable[int]) -> set[int]:
    """Return the slices of ``processes``."""
    return {topology.slice_of[process] for process in processes}


def buddies(process: int, topology: Topology) -> tuple[int, ...]:
    """Return the processes on other slices that keep copies of this process's host state.

    One on every other slice, beginning with the next one, at the same position modulo the size of
    that slice. Empty in a job of one slice.
    """
    position = topology.position(process)
    slices = topology.slices
    own = slices.index(topology.slice_of[process])
    chosen: list[int] = []
    for slice_index in slices[own + 1 :] + slices[:own]:
        members = topology.members[slice_index]
        chosen.append(members[position % len(members)])
    return tuple(chosen)


class RamWriters(NamedTuple):
    """The processes that write a step to storage from RAM; both are empty where none can.

    Attributes:
      members: all of them; the first one leads, with or without tensors of its own.
      holders: those that write tensors.
    """

    members: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()


def writers_from_ram(
    policy: PlacementPolicy,
    topology: Topology,
    held_leaves: Sequence[HeldLeaves],
) -> RamWriters:
    """Return who can write a step of which RAM alone has the bytes.

    These are the usual writers, where each of them stores all that it holds. Else they are the
    first usual writer, which leads, and the first slice that stores all that it holds: with more
    than two slices the primary slice stores nothing.
    """
    leader = topology.writers[0]
    for holders in topology.members.values():
        if _have_all(place_on(policy, topology, holders, held_leaves), held_leaves):
            others = tuple(process for process in holders if process != leader)
            return RamWriters((leader, *others), holders)
    return RamWriters()


def _have_all(placed: Mapping[int, Sequence[ShardId]], held_leaves: Sequence[HeldLeaves]) -> bool:
    """Return whether these processes hold each part of the state, and store all that they hold."""
    stored = {process: frozenset(shards) for process, shards in placed.items()}
    for leaves in held_leaves:
        for box, holders in leaves.holders.items():
            mine = stored.keys() & set(holders)
            shards = {ShardId(path, box) for path in leaves.item_bytes}
            if not mine or not all(shards <= stored[process] for process in mine):
                return False
    return True


def host_state_writer(owner: int, topology: Topology, members: Sequence[int]) -> int:
    """Return the writer that puts the host state of ``owner`` into the persistent tier."""
    if owner in members:
        return owner
    return members[topology.position(owner) % len(members)]


def owners_of(writer: int, topology: Topology, members: Sequence[int]) -> tuple[int, ...]:
    """Return the processes whose host states ``writer`` puts into the persistent tier."""
    every = range(topology.process_count)
    return tuple(owner for owner in every if host_state_writer(owner, topology, members) == writer)


class RetainedShards:
    """The shards of a restore that a process keeps: those that it stores at a save.

    Args:
      stored: shards that placement gives to the process.
      needed: all shards on its devices.
    """

    def __init__(self, stored: Iterable[ShardId], needed: Iterable[ShardId]) -> None:
        self._stored = frozenset(stored)
        self._needed = frozenset(needed)
        self._boxes: dict[str, list[Box]] = {}
        for shard in self._stored:
            self._boxes.setdefault(shard.leaf, []).append(shard.box)

    def __contains__(self, shard: ShardId) -> bool:
        """Return whether ``shard``, or for another mesh a part of it, is stored here."""
        if shard in self._stored or shard in self._needed:
            return shard in self._stored
        boxes = self._boxes.get(shard.leaf, ())
        return any(intersect(shard.box, box) is not None for box in boxes)
