"""The choice of a slot for the next save, and of surplus slots. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Literal

from emergency_ckpt.types import Contents, SaveId

SLOTS_AT_REST = 2
"""One complete step and one being written; more when more steps are to be kept."""
MAX_EXTRA_SLOTS = 2
"""Maximum number of further slots while others are lent."""


@dataclasses.dataclass(frozen=True)
class SlotState:
    """The properties of a slot that a choice depends on.

    Attributes:
      number: the slot's number in its directory.
      save: the published save, or None.
      lent: arrays still read its memory.
      in_use: a writer or a peer uses it now.
      incomplete: ``save`` is known not to be complete on all processes.
      excluded: ``save`` is not on the chain that the job continues.
    """

    number: int
    save: SaveId | None
    lent: bool
    in_use: bool
    incomplete: bool = False
    excluded: bool = False


@dataclasses.dataclass(frozen=True)
class SlotChoice:
    """The decision: write to slot ``number``, or make a slot, or (neither) no slot is available.

    Both: make a slot, and write to ``number`` where there is no room for one.
    """

    number: int | None
    make_one: bool
    reason: str


def choose_slot(
    slots: Collection[SlotState],
    protected: Collection[SaveId],
    *,
    allow_extra: bool,
    at_rest: int = SLOTS_AT_REST,
) -> SlotChoice:
    """Choose the unpublished slot of lowest number, else the one with the oldest unprotected save.

    A save off the chain goes before any on it, and one that is known to be incomplete before any
    that may be whole, also an older one.
    While there are fewer slots than ``at_rest``, a slot is made before a published save is
    overwritten; those that are lent and hold no save keep nothing, so they do not count. When no
    slot is available, one is made if lent slots or several copies of one
    protected save are the cause (with ``allow_extra``, for any cause), up to ``MAX_EXTRA_SLOTS``.
    """
    number = least_needed(slots, protected)
    chosen = next((slot for slot in slots if slot.number == number), None)
    most = at_rest + MAX_EXTRA_SLOTS
    allowed = most if allow_extra else slots_allowed(slots, protected, at_rest)
    keeping = sum(slot.save is not None or not slot.lent for slot in slots)
    is_enough = keeping >= at_rest or len(slots) >= max(allowed, at_rest)
    if chosen is not None and (chosen.save is None or is_enough):
        held = "holds nothing" if chosen.save is None else f"holds old step {chosen.save.step}"
        return SlotChoice(chosen.number, False, f"slot {chosen.number} {held}")
    blocked = "; ".join(_why_kept(slot) for slot in slots)
    if len(slots) < allowed:
        instead = None if chosen is None or len(slots) < at_rest else chosen.number
        return SlotChoice(instead, True, f"another slot is needed: {blocked or 'there is none'}")
    return SlotChoice(None, False, blocked)


def least_needed(slots: Iterable[SlotState], protected: Collection[SaveId]) -> int | None:
    """Return the number of the free slot that would be missed least; None when none is free."""
    free = [slot for slot in slots if _is_free(slot, protected)]
    chosen = min(free, key=_least_needed_first, default=None)
    return None if chosen is None else chosen.number


def slots_allowed(
    slots: Iterable[SlotState], protected: Collection[SaveId], at_rest: int = SLOTS_AT_REST
) -> int:
    """Return ``at_rest`` plus one per lent slot and per further copy of a protected save."""
    extra = 0
    seen: set[SaveId] = set()
    for slot in sorted(slots, key=lambda slot: slot.lent):
        again = slot.save is not None and slot.save in protected and slot.save in seen
        if slot.lent or again:
            extra += 1
        if slot.save is not None:
            seen.add(slot.save)
    return at_rest + min(extra, MAX_EXTRA_SLOTS)


def surplus_slots(
    slots: Collection[SlotState],
    protected: Collection[SaveId],
    known_complete: SaveId | None,
    at_rest: int = SLOTS_AT_REST,
) -> tuple[int, ...]:
    """Return the free slots beyond the allowed number that no restore could need."""
    excess = len(slots) - slots_allowed(slots, protected, at_rest)
    outdated = [
        slot
        for slot in slots
        if _is_free(slot, protected)
        and (slot.save is None or (known_complete is not None and slot.save < known_complete))
    ]
    outdated.sort(key=_least_needed_first)
    return tuple(slot.number for slot in outdated[: max(excess, 0)])


StorageSource = Literal["lend", "make_one", "copy"]
"""The memory from which storage writes a step: its slot on loan, or else a copy of it.

``make_one``: lend it once a spare slot was made, so that saves go on; without room, copy.
"""


def choose_storage_source(
    slots: Collection[SlotState], has_room: bool, at_rest: int = SLOTS_AT_REST
) -> StorageSource:
    """Return whether a slot that is already on loan may stay so for as long as storage takes.

    It may while ``at_rest`` others are left, because storage may hang and saves must go on.
    ``has_room``: the ramdisk has room for one slot more.
    """
    left = sum(not slot.lent for slot in slots)
    if left >= at_rest:
        return "lend"
    can_grow = left + 1 >= at_rest and len(slots) < at_rest + MAX_EXTRA_SLOTS
    return "make_one" if can_grow and has_room else "copy"


def adds_nothing(old: Contents, new: Contents) -> bool:
    """Return True when ``new`` has every shard of ``old`` with the same CRC32C."""
    if old.save != new.save or old.leaves != new.leaves:
        return False
    held = {(entry.leaf, entry.box): entry.crc32c for entry in new.shards}
    return all(held.get((entry.leaf, entry.box)) == entry.crc32c for entry in old.shards)


def _is_free(slot: SlotState, protected: Collection[SaveId]) -> bool:
    return not slot.lent and not slot.in_use and slot.save not in protected


def _least_needed_first(slot: SlotState) -> tuple[bool, bool, bool, tuple[int, str], int]:
    save = slot.save
    identity = (save.step, save.incarnation) if save else (0, "")
    return (save is not None, not slot.excluded, not slot.incomplete, identity, slot.number)


def _why_kept(slot: SlotState) -> str:
    if slot.lent:
        return f"slot {slot.number} is lent to arrays"
    if slot.in_use:
        return f"slot {slot.number} is being written or read"
    assert slot.save is not None, "else it would be free"
    return f"slot {slot.number} holds step {slot.save.step}, which must be kept"
