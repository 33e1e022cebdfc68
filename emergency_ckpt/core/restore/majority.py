"""Finds replicas of one shard that differ, and settles them by a majority of its holders. Pure.

``find_divergence`` compares CRCs of capture time; equal replicas cost little. ``settle`` decides.

A holder has one vote per shard, and none for a shard of which it holds two different copies. A
server has none for a manifest that a process of the job holds too: it may serve that process's own
directory, whose copy would count twice. The CRC32C of more than half of the holders wins; exactly
half decides nothing. Votes are the CRCs that manifests recorded at capture: a copy whose bytes are
damaged later keeps its vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

import msgspec

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.core.restore.restore_plan import SaveParts, filter_inventory
from emergency_ckpt.core.wording import few
from emergency_ckpt.types import Box, Contents, SaveId, ShardEntry, ShardId

_BOX: Callable[[ShardEntry], Box] = attrgetter("box")


class Divergence(msgspec.Struct, frozen=True, order=True):
    """Copies of one shard of one save that had different CRCs when they were captured.

    Attributes:
      copies: (CRC32C, holders that have it), the CRC of most holders first.
    """

    save: SaveId
    shard: ShardId
    copies: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def of(cls, save: SaveId, shard: ShardId, holders: Mapping[int, set[str]]) -> Divergence:
        """Return the divergence with the holders of each CRC in order."""
        ranked = sorted(holders.items(), key=lambda item: (-len(item[1]), item[0]))
        return cls(save, shard, tuple((crc, tuple(sorted(names))) for crc, names in ranked))

    def describe(self) -> str:
        """Return one line that names step, leaf, box and holders."""
        sides = "; ".join(f"{crc:08x} at {few(names)}" for crc, names in self.copies)
        part = f"{self.shard.leaf}{describe(self.shard.box)}"
        return f"step {self.save.step}: copies of {part} differ: {sides}"


def find_divergence(save: SaveId, held: Mapping[str, tuple[Contents, ...]]) -> list[Divergence]:
    """Return the shards of ``save`` whose CRC differs between its holders, sorted by shard.

    Args:
      held: published contents by holder name. Contents of other saves are skipped.
        Holders may share one ``Contents`` object (equal digests): it is read once.
    """
    by_contents: dict[int, tuple[Contents, list[str]]] = {}
    for holder, contents_of_holder in held.items():
        for contents in contents_of_holder:
            if contents.save == save:
                by_contents.setdefault(id(contents), (contents, []))[1].append(holder)
    suspicious = _suspicious([contents for contents, _ in by_contents.values()])
    if not suspicious:
        return []
    crcs: dict[ShardId, dict[int, set[str]]] = {}
    for contents, holders in by_contents.values():
        paths = [leaf.path for leaf in contents.leaves]
        for entry in contents.shards:
            if entry.box in suspicious and 0 <= entry.leaf < len(paths):
                shard = ShardId(paths[entry.leaf], entry.box)
                crcs.setdefault(shard, {}).setdefault(entry.crc32c, set()).update(holders)
    return [
        Divergence.of(save, shard, by_crc)
        for shard, by_crc in sorted(crcs.items(), key=lambda item: item[0])
        if len(by_crc) > 1
    ]


def _suspicious(every: Sequence[Contents]) -> set[Box]:
    """Return the boxes for which some leaf has two CRCs: few or none, of millions."""
    found: set[Box] = set()
    by_path: dict[str, dict[Box, int]] = {}
    by_leaves: dict[int, list[dict[Box, int]]] = {}  # nearly all share one object
    for contents, entries in _compared(every):
        seen = by_leaves.get(id(contents.leaves))
        if seen is None:
            seen = [by_path.setdefault(leaf.path, {}) for leaf in contents.leaves]
            by_leaves[id(contents.leaves)] = seen
        for entry in entries:
            if 0 <= entry.leaf < len(seen):
                crc = entry.crc32c
                if seen[entry.leaf].setdefault(entry.box, crc) != crc:
                    found.add(entry.box)
    return found


def _compared(every: Sequence[Contents]) -> Iterator[tuple[Contents, Iterator[ShardEntry]]]:
    """Yield, for each of ``every`` that has any, the shards whose boxes others have too.

    In most jobs those are the leaves that are replicated inside a slice. Equal boxes of one
    ``Contents`` are usually one object, so they need not be compared by value.
    """
    boxes_of = [{id(box): box for box in map(_BOX, contents.shards)} for contents in every]
    count = Counter(chain.from_iterable(set(boxes.values()) for boxes in boxes_of))
    common = {box for box, times in count.items() if times > 1}
    for contents, boxes in zip(every, boxes_of, strict=True):
        wanted = {number for number, box in boxes.items() if box in common}
        if wanted:
            chosen = map(wanted.__contains__, map(id, map(_BOX, contents.shards)))
            yield contents, compress(contents.shards, chosen)


OnDivergence = Literal["warn", "stop"]
"""Action of a restore when replicas differ and have no majority."""

STORAGE_VOTE = "storage"
"""Name of the persistent tier's checksums among the holders of a shard."""


@dataclass(frozen=True)
class Decided:
    """Replicas that differ, and the CRC32C with more than half of the votes."""

    divergence: Divergence
    crc32c: int

    def describe(self) -> str:
        """Return one line that names step, leaf, box, holders, and the copies that are used."""
        votes = sum(len(names) for _, names in self.divergence.copies)
        won = next(names for crc, names in self.divergence.copies if crc == self.crc32c)
        taken = f"{self.crc32c:08x}, the majority's ({len(won)} of {votes}), is restored"
        return f"{self.divergence.describe()}; {taken}"


@dataclass(frozen=True)
class MajorityResult:
    """The differing replicas of one save.

    Attributes:
      undecided: replicas without a majority.
      outvoted: every copy that must not be used.
    """

    decided: tuple[Decided, ...] = ()
    undecided: tuple[Divergence, ...] = ()
    outvoted: frozenset[Quarantined] = frozenset()


_NO_CRCS: Mapping[ShardId, int] = MappingProxyType({})


def settle(
    inventory: Inventory, save: SaveId, stored_crcs: Mapping[ShardId, int] = _NO_CRCS
) -> MajorityResult:
    """Decide between the replicas of each shard of ``save`` that differ.

    Independent of the order of the inventory's parts. If fewer than half of a shard's holders have
    altered bytes, no altered copy stays usable.

    Args:
      stored_crcs: CRC32C of capture time of some shards, from storage; each is one more vote for a
        shard whose copies differ.
    """
    part = next((part for part in filter_inventory(inventory).saves if part.save == save), None)
    if part is None or len(part.manifests) < 2:
        return MajorityResult()
    processes = {each.holder for each in inventory.holders if each.process_index is not None}
    held: dict[str, tuple[Contents, ...]] = {}
    for digest, holders in part.manifests.items():
        for holder in [each for each in holders if each in processes] or holders:
            held[holder] = (*held.get(holder, ()), inventory.manifests[digest])
    decided: list[Decided] = []
    undecided: list[Divergence] = []
    for found in find_divergence(save, held):
        heard = _with_stored(found, stored_crcs.get(found.shard))
        winner = _majority(heard)
        if winner is None:
            undecided.append(heard)
        else:
            decided.append(Decided(heard, winner))
    outvoted = _outvoted(inventory, part, {each.divergence.shard: each.crc32c for each in decided})
    return MajorityResult(tuple(decided), tuple(undecided), outvoted)


def _with_stored(found: Divergence, crc32c: int | None) -> Divergence:
    if crc32c is None:
        return found
    copies = {crc: set(names) for crc, names in found.copies}
    copies.setdefault(crc32c, set()).add(STORAGE_VOTE)
    return Divergence.of(found.save, found.shard, copies)


def _majority(found: Divergence) -> int | None:
    """Return the CRC32C that more than half of the holders have; None without one."""
    count = Counter(name for _, names in found.copies for name in names)
    for crc, names in found.copies:
        votes = sum(count[name] == 1 for name in names)
        if 2 * votes > len(count):
            return crc
    return None


def _outvoted(
    inventory: Inventory, part: SaveParts, winners: Mapping[ShardId, int]
) -> frozenset[Quarantined]:
    """Return every copy of the shards in ``winners`` with another CRC32C."""
    if not winners:
        return frozenset()
    leaves = {shard.leaf for shard in winners}
    found: set[Quarantined] = set()
    for digest, holders in part.manifests.items():
        contents = inventory.manifests[digest]
        numbers = {n for n, leaf in enumerate(contents.leaves) if leaf.path in leaves}
        for index, entry in enumerate(contents.shards):
            if entry.leaf not in numbers:
                continue
            winner = winners.get(contents.shard_id(index))
            if winner is not None and winner != entry.crc32c:
                found.update(Quarantined(holder, digest, index) for holder in holders)
    return frozenset(found)


def name_outvoted(
    plan: RestorePlan, inventory: Inventory, majority_result: MajorityResult
) -> RestorePlan:
    """Return ``plan`` with the outvoted copies of each process in that process's part."""
    index_of = {each.holder: each.process_index for each in inventory.holders}
    by_process: dict[int, dict[str, list[int]]] = {}
    for copy in majority_result.outvoted:
        process = index_of.get(copy.holder)
        if process in plan.processes and copy.shard is not None:
            by_process.setdefault(process, {}).setdefault(copy.digest, []).append(copy.shard)
    processes = dict(plan.processes)
    for process, shards in by_process.items():
        outvoted = {digest: tuple(sorted(numbers)) for digest, numbers in sorted(shards.items())}
        processes[process] = msgspec.structs.replace(processes[process], outvoted=outvoted)
    return msgspec.structs.replace(plan, processes=processes)
