"""Small questions that the leader of a restore asks of its inventory, and how it plans."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from emergency_ckpt.core.restore.candidates import PERSISTENT_HOLDER
from emergency_ckpt.core.restore.inventory import Inventory, PersistentStep, Quarantined
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.core.timeline import new_incarnation, number_of

_NAMED_STEPS = 10


def may_precede(stored: PersistentStep, ready: RestorePlan) -> bool:
    """Return whether a step in storage may have to be taken in place of one in RAM."""
    if stored.step != ready.step:
        return stored.step > ready.step
    return ready.save is None or stored.incarnation != ready.save.incarnation


def next_incarnation(inventory: Inventory, greatest: int) -> str:
    """Return the name of a life that begins after ``greatest`` and all on record. RestoreFailed.

    Not of a step in storage that cannot be used: whoever writes its marker would choose the number.
    """
    numbers = [greatest, *(holder.greatest for holder in inventory.holders)]
    numbers += [number_of(each.incarnation) for each in inventory.persistent if not each.problem]
    if inventory.timeline is not None:
        numbers.append(number_of(inventory.timeline.head))
    return new_incarnation(max(numbers), secrets.token_hex(8))


def persistent_unusable(step: int) -> Quarantined:
    """Return what takes a step of storage out of the next plan."""
    return Quarantined(PERSISTENT_HOLDER, f"{PERSISTENT_HOLDER}/{step}")


def steps_in_words(steps: Sequence[int]) -> str:
    """Return the newest of ``steps``, which rise, in words."""
    left_out = len(steps) - _NAMED_STEPS
    older = f" and {left_out} older" if left_out > 0 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[-_NAMED_STEPS:]))}{older}"
