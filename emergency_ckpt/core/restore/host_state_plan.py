"""The copies of one save's host states that a restore uses, and their sources for each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from emergency_ckpt.core.restore.candidates import SaveParts, UsableInventory
from emergency_ckpt.core.restore.plan_types import HostStateFetch, few

MAX_HOST_STATE_SOURCES = 4


@dataclass(frozen=True)
class HostStates:
    """A complete set of host states of one save.

    Attributes:
      count: number of processes at the time of the save.
      copies: by owner: the digest to use and its holders.
      all_empty: every held copy says that no process had any non-tensor state.
      notes: owners with different copies, in words.
    """

    count: int
    copies: Mapping[int, tuple[str, tuple[str, ...]]]
    all_empty: bool
    notes: tuple[str, ...]


_Copies = dict[str, dict[str, bool]]
"""digest -> holder -> whether it is empty"""


def choose_host_states(part: SaveParts, process_count: int) -> HostStates | str:
    """Return the host states of the save, or the missing ones in words.

    A save's host states should all name one process count. Otherwise a complete set of the current
    count is preferred, then one of the larger count; sets are never mixed.
    """
    sets: dict[int, dict[int, _Copies]] = {}
    for holder, held in part.host_states:
        if 0 <= held.owner < held.count:
            copies = sets.setdefault(held.count, {}).setdefault(held.owner, {})
            by_holder = copies.setdefault(held.digest, {})
            by_holder[holder] = by_holder.get(holder, True) and held.empty
    if not sets:
        return "no host state is held anywhere"
    whole = [size for size, owners in sets.items() if len(owners) == size]
    if not whole:
        size = min(sets, key=lambda size: (size - len(sets[size]), -size))
        owners = sets[size]
        lost = size - len(owners)
        first = islice((owner for owner in range(size) if owner not in owners), 4)
        names = ", ".join(map(str, first)) + (" ..." if lost > 4 else "")
        return f"{lost} of {size} host states are held nowhere: process {names}"
    return _chosen(sets, max(whole, key=lambda size: (size == process_count, size)))


def _chosen(sets: Mapping[int, Mapping[int, _Copies]], size: int) -> HostStates:
    copies: dict[int, tuple[str, tuple[str, ...]]] = {}
    notes: list[str] = []
    all_empty = True
    for owner, by_digest in sorted(sets[size].items()):
        # Only the owner makes a host state, and copies are pushed unchanged: two digests mean that
        # it was made twice. The digest with most holders wins. The owner's own copy has no
        # precedence, because process indices may have been permuted.
        digest = min(by_digest, key=lambda digest: (-len(by_digest[digest]), digest))
        copies[owner] = (digest, tuple(by_digest[digest]))
        all_empty = all_empty and all(all(held.values()) for held in by_digest.values())
        if len(by_digest) > 1:
            notes.append(
                f"{len(by_digest)} different host states of process {owner} are held:"
                f" using the one at {few(by_digest[digest])}"
            )
    return HostStates(size, copies, all_empty, tuple(notes))


class HostStateAssignment:
    """Assigns host states to processes. Called once per process, in order."""

    def __init__(self, usable: UsableInventory, states: HostStates | None, *, remap: bool) -> None:
        self._usable = usable
        self._states = None if states is None or states.all_empty else states
        # One tuple for all, since every process needs every former state.
        self._all = self._every_owner(self._states) if remap and self._states else None

    def of(self, process: int) -> tuple[HostStateFetch, ...]:
        """Return the host states for ``process``: its own, or all of them when remapping."""
        if self._states is None:
            return ()
        if self._all is not None:
            return self._all
        digest, holders = self._states.copies[process]
        own = self._usable.own.get(process)
        start = process % len(holders)  # spreads a lost slice's fetches over the buddies' slices
        order = [name for name in holders[start:] + holders[:start] if name != own]
        if own in holders:
            order.insert(0, own)
        return (HostStateFetch(process, digest, tuple(order[:MAX_HOST_STATE_SOURCES])),)

    def _every_owner(self, states: HostStates) -> tuple[HostStateFetch, ...]:
        return tuple(
            HostStateFetch(owner, digest, holders[:MAX_HOST_STATE_SOURCES])
            for owner, (digest, holders) in states.copies.items()
        )
