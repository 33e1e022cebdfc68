"""The wait in ``save`` for the previous save.

A save to RAM waits at most ``Config.save_timeout_s``. A save to storage waits only if a face
demands that, or if the step must exist (a forced save, or the save after a notice). Where saves
come too fast, the leader leaves a save out for all processes (``turns``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from absl import logging

from emergency_ckpt.cluster.job import Job
from emergency_ckpt.core.save.save_rules import skip_reason, too_often_text
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.errors import PeerLeft, SaveFailed
from emergency_ckpt.save.save_work import SaveRequest, TierSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, TierName

_INSPECTION_S = 1.0
"""Pause between looks at the other processes."""


class TurnWait:
    """Waits for the turn of a save. For the training thread."""

    def __init__(
        self, job: Job, saves: TierSaves, tell_skipped: Callable[[TierName, SaveId], None]
    ) -> None:
        """``tell_skipped``: tells the others, in the background, that a save is left out here."""
        self._job, self._saves = job, saves
        self._tell_skipped = tell_skipped
        self._too_often = Repeats()

    def wait(self, schedule: TierSchedule, request: SaveRequest, *, is_again: bool) -> bool:
        """Wait for the previous save; return False, and leave ``request`` out, if that is too long.

        A ``request`` is also left out when a process that takes part in the previous save has died.
        """
        name, save = schedule.name, request.save
        limit_s = self._longest_wait_s(name, request)
        try:
            # The save under way has limits of its own, so this wait for it is no hang.
            with self._job.progress.inside("save", limit_s):
                if name == LOCAL:
                    is_idle = self._wait_for_ram(schedule, request, limit_s)
                else:
                    is_idle = self._wait_for_storage(schedule, request, limit_s)
        except PeerLeft as error:
            target = f"step {save.step} to the {name} tier"
            failure = SaveFailed("save", target, error.problem, hint=error.hint)
            failure.__cause__ = error
            self._leave_out(schedule, request, failure)
            return False
        if is_idle:
            return True
        if is_again:  # the save under way is of this very step: nothing is missed yet
            self._leave_out(schedule, request, None)
        elif name == PERSISTENT or request.must_exist:
            self._leave_out(schedule, request, self._missed(name, save, limit_s))
        else:
            self._leave_out(schedule, request, None)
            self._say_too_often(schedule, save)
        return False

    def _leave_out(
        self, schedule: TierSchedule, request: SaveRequest, why: SaveFailed | None
    ) -> None:
        """Leave a save out on this process, which tells the others in the background.

        ``why``: recorded as a failure; None where leaving the save out is none.
        """
        job, save = self._job, request.save
        schedule.leave_out(save.step, partial(self._tell_skipped, schedule.name, save))
        if why is not None:
            is_lost = request.must_exist and schedule.name == PERSISTENT
            job.failures.record(why, lost_step=save.step if is_lost else None)
            self._tell_busy(schedule, save, why.problem)

    def _tell_busy(self, schedule: TierSchedule, save: SaveId, reason: str) -> None:
        self._job.events.emit(
            "save.skipped", step=save.step, tier=schedule.name, cause="busy", reason=reason
        )

    def _wait_for_ram(self, schedule: TierSchedule, request: SaveRequest, limit_s: float) -> bool:
        """Wait for the previous save to RAM; return whether ``request`` may begin.

        PeerLeft: a process that takes part in the previous save has died.
        """
        turns, save, now_s = self._saves.local.turns, request.save, time.monotonic()
        deadline_s = now_s + limit_s
        early_s = deadline_s if request.must_exist else now_s + turns.limit_s(limit_s)
        while True:
            left_s = (early_s if now_s < early_s else deadline_s) - now_s
            if schedule.wait_idle(min(_INSPECTION_S, left_s)):
                return not turns.is_left_out(save)
            now_s = time.monotonic()
            if (now_s >= early_s and turns.leave_out(save)) or now_s >= deadline_s:
                return False
            self._job.inspect()

    def _wait_for_storage(
        self, schedule: TierSchedule, request: SaveRequest, limit_s: float
    ) -> bool:
        """Wait for the previous save to storage; return whether it has ended.

        A save is waited for once only, unless the step must exist: after a step has waited for it
        in vain, later steps do not wait. PeerLeft as ``_wait_for_ram``.
        """
        waits = request.must_exist or not schedule.waited_in_vain
        left_s = limit_s if waits else 0
        deadline_s = time.monotonic() + left_s
        while not schedule.wait_idle(min(_INSPECTION_S, left_s)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._job.inspect()
        return True

    def _say_too_often(self, schedule: TierSchedule, save: SaveId) -> None:
        """Report that saves come too fast; at the leader, also warn of it now and then."""
        text = too_often_text(save.step, schedule.last_started, *schedule.pace)
        self._tell_busy(schedule, save, text)
        if self._job.process[0] == 0:
            before = self._too_often.occurred("", time.monotonic())
            if before is not None:
                logging.warning("%s", text)

    def _longest_wait_s(self, name: TierName, request: SaveRequest) -> float:
        """Return the longest wait for the previous save."""
        config = self._job.config
        if request.limit_s is not None:
            return request.limit_s
        if name == LOCAL:
            return config.save_timeout_s
        # A slow bucket must not hold up training here, since local saves of all processes would
        # wait. A save that is left out is not made up for: the leader would have to announce that.
        least_s = config.save_timeout_s if request.must_exist else 0.0
        return max(least_s, config.storage_wait_timeout_s)

    def _missed(self, name: TierName, save: SaveId, limit_s: float) -> SaveFailed:
        waits = self._saves.by_tier[name].waits_for_others
        problem, hint = skip_reason(name, limit_s, waits_for_others=waits)
        return SaveFailed("save", f"step {save.step} to the {name} tier", problem, hint=hint)
