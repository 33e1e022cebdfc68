"""Groups inventories by save, and drops what is unusable, each with its reason.

The result does not depend on the order of the inventory's parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HolderInventory,
    Inventory,
    Quarantined,
)
from emergency_ckpt.core.restore.plan_types import few
from emergency_ckpt.types import PERSISTENT, SaveId

MAX_NOTES = 16

PERSISTENT_HOLDER = PERSISTENT
"""Stands for the persistent tier in ``Quarantined.holder``."""


@dataclass
class SaveParts:
    """The held parts of one save. Holders' names are in the order of ``UsableInventory.holders``.

    Attributes:
      manifests: digest -> holders that published it and have it intact or in part.
      spoiled: digest -> holder -> shard indices that are quarantined there.
      host_states: (holder, what it holds) of each intact host state.
      faults: reported parts of this save that cannot be used, in words.
    """

    save: SaveId
    manifests: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    damaged: dict[str, dict[str, frozenset[int]]] = field(
        default_factory=dict[str, dict[str, frozenset[int]]]
    )
    host_states: list[tuple[str, HeldHostState]] = field(
        default_factory=list[tuple[str, HeldHostState]]
    )
    faults: list[str] = field(default_factory=list[str])


@dataclass
class UsableInventory:
    """The usable part of an inventory.

    Attributes:
      holders: by name; processes by index, then servers by name.
      own: process index -> name of the holder that is that process.
      saves: newest first (step, then incarnation).
      known_complete: saves once known to be complete -> the holders that knew.
    """

    holders: dict[str, HolderInventory]
    own: dict[int, str]
    saves: list[SaveParts]
    known_complete: dict[SaveId, list[str]]
    notes: list[str]


def filter_inventory(inventory: Inventory) -> UsableInventory:
    """Drop holders with contradictory names and unusable manifests; group the rest by save."""
    notes: list[str] = []
    holders = _distinct_holders(inventory.holders, notes)
    whole, partial = _quarantine(inventory.quarantined)
    parts: dict[SaveId, SaveParts] = {}
    known: dict[SaveId, list[str]] = {}
    for holder in holders.values():
        if holder.known_complete is not None:
            known.setdefault(holder.known_complete, []).append(holder.holder)
            parts.setdefault(holder.known_complete, SaveParts(holder.known_complete))
        _sift_tensors(holder, inventory, whole, partial, parts)
        _sift_host_states(holder, whole, parts)
    newest_first = sorted(parts.values(), key=lambda part: part.save, reverse=True)
    own = {h.process_index: h.holder for h in holders.values() if h.process_index is not None}
    return UsableInventory(holders, own, newest_first, known, notes[:MAX_NOTES])


def _distinct_holders(
    reported: Iterable[HolderInventory], notes: list[str]
) -> dict[str, HolderInventory]:
    """Return holders by name. Two that share a name or a process index are both dropped."""
    by_name: dict[str, HolderInventory] = {}
    contradictory: set[str] = set()
    for holder in reported:
        first = by_name.setdefault(holder.holder, holder)
        if first is not holder and not _same(first, holder):
            contradictory.add(holder.holder)
    indices = Counter(h.process_index for h in by_name.values() if h.process_index is not None)
    for holder in by_name.values():
        if holder.process_index is not None and indices[holder.process_index] > 1:
            contradictory.add(holder.holder)
    if contradictory:
        names = few(sorted(contradictory))
        notes.append(f"ignored {names}: more than one inventory under one name or process index")
    kept = [h for name, h in by_name.items() if name not in contradictory]
    kept.sort(key=lambda h: (h.process_index is None, h.process_index or 0, h.holder))
    return {h.holder: h for h in kept}


def _same(a: HolderInventory, b: HolderInventory) -> bool:
    return (a.process_index, a.address, a.known_complete) == (
        b.process_index,
        b.address,
        b.known_complete,
    ) and (set(a.tensors), set(a.host_states)) == (set(b.tensors), set(b.host_states))


def _quarantine(
    quarantined: Iterable[Quarantined],
) -> tuple[set[tuple[str, str]], dict[tuple[str, str], set[int]]]:
    """Return the (holder, digest) pairs quarantined entirely, and the shards of the others."""
    whole: set[tuple[str, str]] = set()
    partial: dict[tuple[str, str], set[int]] = {}
    for item in quarantined:
        if item.shard is None:
            whole.add((item.holder, item.digest))
        else:
            partial.setdefault((item.holder, item.digest), set()).add(item.shard)
    return whole, partial


def _sift_tensors(
    holder: HolderInventory,
    inventory: Inventory,
    whole: set[tuple[str, str]],
    partial: Mapping[tuple[str, str], set[int]],
    parts: dict[SaveId, SaveParts],
) -> None:
    for held in sorted(set(holder.tensors)):
        part = parts.get(held.save)
        if part is None:
            part = parts[held.save] = SaveParts(held.save)
        contents = inventory.manifests.get(held.digest)
        where = (holder.holder, held.digest)
        label = f"manifest {held.digest[:12]} at {holder.holder}"
        if contents is None:
            part.faults.append(f"{label} could not be read")
        elif contents.save != held.save:
            part.faults.append(f"{label} is of another save (step {contents.save.step})")
        elif where in whole:
            part.faults.append(f"{label} is quarantined")
        else:
            part.manifests.setdefault(held.digest, []).append(holder.holder)
            bad = partial.get(where)
            if bad:
                part.damaged.setdefault(held.digest, {})[holder.holder] = frozenset(bad)
                count = f"{len(bad)} shard{'s' if len(bad) > 1 else ''}"
                part.faults.append(f"{count} of {label} quarantined")


def _sift_host_states(
    holder: HolderInventory, whole: set[tuple[str, str]], parts: dict[SaveId, SaveParts]
) -> None:
    for held in holder.host_states:
        part = parts.get(held.save)
        if part is None:
            part = parts[held.save] = SaveParts(held.save)
        if (holder.holder, held.digest) in whole:
            part.faults.append(f"host state {held.owner} at {holder.holder} is quarantined")
        else:
            part.host_states.append((holder.holder, held))
