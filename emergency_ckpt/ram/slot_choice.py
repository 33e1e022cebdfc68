"""The choice of a slot for the next save, and of surplus slots. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from emergency_ckpt.types import Contents, SaveId

SLOTS_AT_REST = 2
"""One complete step and one being written; more when more steps are to be kept."""
_EXTRA_SLOTS_OF_A_RESTORE = 2


def slots_for(kept_steps: int, *, writes_storage: bool) -> int:
    """Return the number of slots of a process whose RAM keeps so many complete steps.

    The next save writes one slot more. A save to storage pins one for as long as it writes, and
    local saves go on beside it.
    """
    return kept_steps + 1 + writes_storage


@dataclasses.dataclass(frozen=True)
class SlotState:
    """The properties of a slot that a choice depends on.

    Attributes:
      number: the slot's number in its directory.
      save: the published save, or None.
      in_use: a writer or a reader uses it now, or a save to storage has it pinned.
      incomplete: ``save`` is known not to be complete on all processes.
      excluded: ``save`` is not on the chain that the job continues.
    """

    number: int
    save: SaveId | None
    in_use: bool
    incomplete: bool = False
    excluded: bool = False


@dataclasses.dataclass(frozen=True)
class SlotChoice:
    """The decision: write to slot ``number``, or make a slot, or neither, with the ``reason``."""

    number: int | None
    make_one: bool = False
    reason: str = ""


def choose_slot(
    slots: Collection[SlotState],
    protected: Collection[SaveId],
    *,
    needed: int = SLOTS_AT_REST,
    at_rest: int | None = None,
    allow_extra: bool = False,
) -> SlotChoice:
    """Choose the unpublished slot of lowest number, else the one with the oldest unprotected save.

    Saves off the chain are overwritten first, then saves that are known to be incomplete, whatever
    their age. While there are fewer slots than ``needed``, a slot is made before a published save
    is overwritten. When no slot is available, one is made up to ``at_rest`` (None: ``needed``), or
    where several slots have copies of one protected save. ``allow_extra``: a restore may have slots
    beyond ``at_rest``, so that no older step is lost while the restore brings a newer step that may
    yet turn out to be damaged.
    """
    number = least_needed(slots, protected)
    chosen = next((slot for slot in slots if slot.number == number), None)
    if chosen is not None and (chosen.save is None or len(slots) >= needed):
        return SlotChoice(chosen.number)
    usual = needed if at_rest is None else at_rest
    most = slots_allowed(slots, protected, usual)
    if allow_extra:
        # A job that saved to storage left one slot more than this start has been asked for yet.
        most = max(most + 1, usual + _EXTRA_SLOTS_OF_A_RESTORE)
    if len(slots) < most:
        return SlotChoice(None, make_one=True)
    return SlotChoice(None, reason="; ".join(_why_kept(slot) for slot in slots))


def least_needed(slots: Iterable[SlotState], protected: Collection[SaveId]) -> int | None:
    """Return the number of the free slot that would be missed least; None when none is free."""
    free = [slot for slot in slots if _is_free(slot, protected)]
    chosen = min(free, key=_least_needed_first, default=None)
    return None if chosen is None else chosen.number


def slots_allowed(
    slots: Iterable[SlotState], protected: Collection[SaveId], at_rest: int = SLOTS_AT_REST
) -> int:
    """Return ``at_rest`` plus one per further copy of a protected save."""
    saves = [slot.save for slot in slots if slot.save is not None and slot.save in protected]
    return at_rest + len(saves) - len(set(saves))


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


def adds_nothing(old: Contents, new: Contents) -> bool:
    """Return True when ``new`` has every shard of ``old`` with the same CRC32C."""
    if old.save != new.save or old.leaves != new.leaves:
        return False
    new_crcs = {(entry.leaf, entry.box): entry.crc32c for entry in new.shards}
    return all(new_crcs.get((entry.leaf, entry.box)) == entry.crc32c for entry in old.shards)


def _is_free(slot: SlotState, protected: Collection[SaveId]) -> bool:
    return not slot.in_use and slot.save not in protected


def _least_needed_first(slot: SlotState) -> tuple[bool, bool, bool, tuple[int, str], int]:
    save = slot.save
    identity = (save.step, save.incarnation) if save else (0, "")
    return (save is not None, not slot.excluded, not slot.incomplete, identity, slot.number)


def _why_kept(slot: SlotState) -> str:
    if slot.in_use:
        return f"slot {slot.number} is being written or read"
    assert slot.save is not None, "else it would be free"
    return f"slot {slot.number} holds step {slot.save.step}, which must be kept"
