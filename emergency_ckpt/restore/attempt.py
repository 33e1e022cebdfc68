"""One attempt of this process at its part of a restore, and the status that it then reports."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from emergency_ckpt.cluster.coordination import ERROR_LIMIT_CHARS
from emergency_ckpt.core.restore.inventory import persistent_unusable
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.restore.rounds import Status, failure_kind
from emergency_ckpt.restore.shards import CopiesFailed
from emergency_ckpt.restore.storage_load import LoadPlan

Plan = TypeVar("Plan", RestorePlan, LoadPlan)
_T = TypeVar("_T")


def carry_out(work: Callable[[Plan], _T], plan: Plan) -> tuple[_T | None, Status]:
    """Return the result of ``work``, or None, with the status to report to all processes."""
    try:
        return work(plan), Status()
    except Exception as error:  # noqa: BLE001 - becomes the collective error of all processes
        _forget_frames(error)
        return None, _status_of(error, plan)


def _forget_frames(error: BaseException | None) -> None:
    """Release the objects that the frames of ``error`` refer to, and those of its causes.

    They have memory of this attempt, which the next attempt needs, and, when ``restore`` has
    returned, the arrays on the devices. Errors may be in reference cycles.
    """
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _status_of(error: Exception, plan: RestorePlan | LoadPlan) -> Status:
    """Return the error, with the copies to blame: a whole step in storage, or single RAM copies."""
    if isinstance(error, CopiesFailed):
        return Status(str(error), error.unusable)
    is_load = isinstance(plan, LoadPlan)
    lacks = isinstance(error, PersistentTierError) and not error.unreachable
    if lacks or (isinstance(error, CorruptData) and is_load):
        return Status(str(error)[:ERROR_LIMIT_CHARS], (persistent_unusable(plan.step),))
    if isinstance(error, CorruptData):
        return Status(str(error)[:ERROR_LIMIT_CHARS])
    text = f"{type(error).__name__}: {error}"[:ERROR_LIMIT_CHARS]
    return Status(text, kind=failure_kind(error))
