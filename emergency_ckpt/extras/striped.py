"""Striped placement: each shard on some of the slices that have it, in groups, with even bytes.

``placement=Striped(2)``, or the text ``"striped(2)"``. A process then transfers and stores less at
a save, and fetches more from its peers at a restore.

Groups, not rings: with two copies on four slices the pairs are {0, 1} and {2, 3}. Only two pairs of
hosts at each position are then fatal when they fail together; in a ring it would be four.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.placement import (
    HeldLeaves,
    Holders,
    Topology,
    slices_of,
)
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.types import Box, ShardId


@dataclass(frozen=True)
class Striped:
    """Each shard is stored on ``copies`` of the slices that have it, never twice on one slice.

    A process stores ``copies / slices`` of its part of the state, and fetches the rest from peers
    when it restores. The RAM tier survives the loss of any ``copies - 1`` slices. With as many
    copies as slices, or more, every slice stores everything.

    Attributes:
      everywhere_below_bytes: a leaf with fewer bytes in all is stored by every process that holds
        a part of it, because fetching it would take longer than keeping it.

    Raises:
      ConfigError: fewer than one copy, negative bytes, or a value that is no whole number.
    """

    copies: int
    everywhere_below_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        numbers: tuple[object, ...] = (self.copies, self.everywhere_below_bytes)
        whole = all(type(number) is int for number in numbers)
        if not whole or self.copies < 1 or self.everywhere_below_bytes < 0:
            raise ConfigError([f"{self} is no placement: at least one copy, no negative size"])

    def stored_by(
        self, topology: Topology, processes: Collection[int], held: Sequence[HeldLeaves]
    ) -> Mapping[int, Sequence[ShardId]]:
        """As ``PlacementPolicy``."""
        return _Striping(self, topology.slice_of, held).stored_by(processes)

    def copies_of(
        self, topology: Topology, leaves: HeldLeaves, holders: Holders
    ) -> Mapping[str, int]:
        """As ``PlacementPolicy``."""
        elements, copies = prod(leaves.shape), min(self.copies, len(slices_of(topology, holders)))
        return {
            path: len(holders) if elements * nbytes < self.everywhere_below_bytes else copies
            for path, nbytes in leaves.item_bytes.items()
        }


def from_text(argument: str) -> Striped:
    """Return the policy of the text ``"striped(<copies>)"``. ConfigError: not such a number."""
    if not (argument.isascii() and argument.isdigit() and len(argument) < 7 and int(argument)):
        raise ConfigError([f"placement 'striped({argument})': the number of copies is 1 or more"])
    return Striped(int(argument))


def blocks(slices: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ``copies`` slices that store shards; one set of all when there are fewer.

    Shards can be dealt to these sets so that all slices get equal bytes. There are as few sets as
    Euclid's algorithm gives: groups while two fit, and the remainder (fewer than two groups) has
    the sets whose complements are groups, by the same rule. Five slices and two copies: {0, 1}, {2,
    3}, {2, 4}, {3, 4}.
    """
    members = tuple(slices)
    sets: list[tuple[int, ...]] = []
    while len(members) >= 2 * copies:
        sets.append(members[:copies])
        members = members[copies:]
    if len(members) <= copies:
        return (*sets, members)
    left_out = blocks(members[::-1], len(members) - copies)
    return (*sets, *(tuple(s for s in members if s not in out) for out in left_out))


class _Unit(NamedTuple):
    """A shard to place; ``holders`` may store it."""

    nbytes: int
    shard: ShardId
    holders: Holders


def _units(box: Box, holders: Holders, striped: Iterable[tuple[str, int]]) -> list[_Unit]:
    elements = volume(box)
    return [_Unit(elements * nbytes, ShardId(path, box), holders) for path, nbytes in striped]


class _Striping:
    """The processes that store each shard of a job; every process computes the same.

    Shards that several hosts of a slice hold are dealt first, over all of them; then those that one
    host of a slice holds, over that host and its replicas. Of the second kind a process therefore
    computes only those of itself and its replicas.
    """

    def __init__(
        self, policy: Striped, slice_of: Sequence[int], held: Iterable[HeldLeaves]
    ) -> None:
        self._policy = policy
        self._slice_of = slice_of
        self._everywhere: list[tuple[str, HeldLeaves]] = []
        self._shared: list[_Unit] = []
        self._exclusive: list[tuple[HeldLeaves, list[tuple[str, int]], list[Box]]] = []
        for leaves in held:
            self._sort_in(leaves)

    def _sort_in(self, leaves: HeldLeaves) -> None:
        striped: list[tuple[str, int]] = []
        for path, item_bytes in leaves.item_bytes.items():
            if prod(leaves.shape) * item_bytes < self._policy.everywhere_below_bytes:
                self._everywhere.append((path, leaves))
            else:
                striped.append((path, item_bytes))
        if not striped:
            return
        exclusive: list[Box] = []
        for box, holders in leaves.holders.items():
            if len({self._slice_of[process] for process in holders}) == len(holders):
                exclusive.append(box)
            else:
                self._shared += _units(box, holders, striped)
        if exclusive:
            self._exclusive.append((leaves, striped, exclusive))

    def stored_by(self, processes: Collection[int]) -> dict[int, list[ShardId]]:
        """Return the shards that each of ``processes`` stores, in no order; others may be there."""
        among = self._replicas_of(processes)
        exclusive: list[_Unit] = []
        for leaves, striped, boxes in self._exclusive:
            for box in boxes:
                holders = leaves.holders[box]
                if not among.isdisjoint(holders):
                    exclusive += _units(box, holders, striped)
        stored: dict[int, list[ShardId]] = {}
        loads = dict.fromkeys(range(len(self._slice_of)), 0)
        for units in (self._shared, exclusive):
            candidates: dict[Holders, list[tuple[int, int, Holders]]] = {}
            # Largest first, because the last units decide how even the result is.
            for unit in sorted(units, key=lambda unit: (-unit.nbytes, unit.shard)):
                heap = candidates.get(unit.holders)
                if heap is None:
                    heap = candidates[unit.holders] = self._places(unit.holders, loads)
                for process in _least_loaded(heap, loads):
                    loads[process] += unit.nbytes
                    stored.setdefault(process, []).append(unit.shard)
        for path, leaves in self._everywhere:
            for box, holders in leaves.holders.items():
                for process in among.intersection(holders):
                    stored.setdefault(process, []).append(ShardId(path, box))
        return stored

    def _replicas_of(self, processes: Collection[int]) -> set[int]:
        """Return ``processes`` and their replicas, with the replicas of these replicas.

        A replica of a process holds a box that this process holds alone in its slice.
        """
        sets = {leaves.holders[box] for leaves, _, boxes in self._exclusive for box in boxes}
        replicas, size = set(processes), 0
        while size < len(replicas):
            size = len(replicas)
            for holders in sets:
                if not replicas.isdisjoint(holders):
                    replicas.update(holders)
        return replicas

    def _places(self, holders: Holders, loads: Mapping[int, int]) -> list[tuple[int, int, Holders]]:
        """Return a heap of the sets of processes that a shard may go to: (load, order, processes).

        A set has one process in each slice of a block, all at the same place among the holders of
        their slices, so that few sets of hosts are fatal together.
        """
        by_slice: dict[int, list[int]] = {}
        for process in holders:
            by_slice.setdefault(self._slice_of[process], []).append(process)
        columns = max(map(len, by_slice.values()))
        sets = [
            tuple(by_slice[s][column % len(by_slice[s])] for s in block)
            for column in range(columns)
            for block in blocks(sorted(by_slice), self._policy.copies)
        ]
        # Each position begins with another block, otherwise the first slices get every odd shard.
        start = holders[0] % len(sets)
        order = sets[start:] + sets[:start]
        heap = [
            (sum(loads[p] for p in processes), place, processes)
            for place, processes in enumerate(order)
        ]
        heapify(heap)
        return heap


def _least_loaded(heap: list[tuple[int, int, Holders]], loads: Mapping[int, int]) -> Holders:
    """Return the set of processes with the fewest bytes. Loads only grow, so entries may be old."""
    while True:
        known, place, processes = heap[0]
        actual = sum(loads[process] for process in processes)
        if known == actual:
            return processes
        heapreplace(heap, (actual, place, processes))
