"""Settles replicas of one shard that differ, by a majority of its holders. Pure.

A holder has one vote per shard, and none for a shard of which it holds two different copies. A
server has none for a manifest that a process of the job holds too: it may serve that process's own
directory, whose copy would count twice. The CRC32C of more than half of the holders wins; exactly
half decides nothing. Votes are the CRCs that manifests recorded at capture: a copy whose bytes are
damaged later keeps its vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from emergency_ckpt.core.restore.candidates import SaveParts, filter_inventory
from emergency_ckpt.core.restore.divergence import Divergence, find_divergence
from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.types import Contents, SaveId, ShardId

OnDivergence = Literal["warn", "stop"]
"""Action of a restore when replicas differ and have no majority."""

WITNESS = "storage"
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


_NO_WITNESS: Mapping[ShardId, int] = MappingProxyType({})


def settle(
    inventory: Inventory, save: SaveId, witness: Mapping[ShardId, int] = _NO_WITNESS
) -> MajorityResult:
    """Decide between the replicas of each shard of ``save`` that differ.

    Independent of the order of the inventory's parts. If fewer than half of a shard's holders have
    altered bytes, no altered copy stays usable.

    Args:
      witness: CRC32C of capture time of some shards, from elsewhere; each is one more vote for a
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
        heard = _with_witness(found, witness.get(found.shard))
        winner = _majority(heard)
        if winner is None:
            undecided.append(heard)
        else:
            decided.append(Decided(heard, winner))
    outvoted = _outvoted(inventory, part, {each.divergence.shard: each.crc32c for each in decided})
    return MajorityResult(tuple(decided), tuple(undecided), outvoted)


def _with_witness(found: Divergence, crc32c: int | None) -> Divergence:
    if crc32c is None:
        return found
    copies = {crc: set(names) for crc, names in found.copies}
    copies.setdefault(crc32c, set()).add(WITNESS)
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
