"""A restore together with the saves around it: held up before, continued from its step after."""

from __future__ import annotations

import time
from typing import NamedTuple

from emergency_ckpt.cluster.process_placement import ProcessPlacement
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.core.save.save_rules import wanted_step
from emergency_ckpt.errors import RamdiskFull, RestoreFailed
from emergency_ckpt.restore.host_state import HostStateRestore
from emergency_ckpt.restore.request import RestoredState, RestoreReport, RestoreRequest
from emergency_ckpt.restore.restore import Restore
from emergency_ckpt.restore.rounds import refuse
from emergency_ckpt.start import Opened
from emergency_ckpt.state.tree import PyTree, describe
from emergency_ckpt.types import LOCAL, PERSISTENT, TierName


class _Begun(NamedTuple):
    """The parts of one restore on this process, whose call has begun."""

    request: RestoreRequest
    placement: ProcessPlacement
    value: HostStateRestore


class Resume:
    """Restores of one checkpointer. For the training thread.

    Neither ``save`` nor ``restore`` knows the other: this class passes on what one needs from the
    other.
    """

    def __init__(self, parts: Opened) -> None:
        self._parts = parts
        self._restores = 0

    def restore(
        self, state: PyTree, host_state: object, step: object, *, tensors_only: bool
    ) -> tuple[RestoredState, RestoreReport] | None:
        """Restore ``step``, and let saves go on from it. Collective; blocks.

        0. The call is counted: its rounds, and the announcements that follow, have its number.
        1. Saves in progress end, and no step is announced. An error up to here is told to the
           others, which wait for this process.
        2. ``Restore.run`` brings the step, or finds that there never was one.
        3. All settle: leftovers of saves are forgotten, RAM is reserved for the saves to come.
        4. Steps are announced again, also after an error, and saves continue from the step.

        Returns None where there was nothing to restore; raises as the caller's own ``restore``.
        """
        parts = self._parts
        name, is_first = f"restore/{self._restores}", self._restores == 0
        self._restores += 1
        try:
            begun = self._begin(name, state, host_state, step, tensors_only=tensors_only)
            restored, report = self._run(name, begun)
        finally:
            parts.saver.ending.end_restore(self._restores)
        if restored is None or report is None:
            parts.job.timelines.note_continuation()
            parts.saver.expect_steps_after(-1)
            if is_first:
                parts.tell_begins_anew()
            return None
        self._continue_from(restored, is_requested=begun.request.requested_step is not None)
        return restored, report

    def _begin(
        self, name: str, state: PyTree, host_state: object, step: object, *, tensors_only: bool
    ) -> _Begun:
        """Return what this process restores, once no save is in progress. Tell of an error."""
        parts, of_restore, ending = self._parts, self._parts.job, self._parts.saver.ending
        if parts.process[0] == 0 and (ended := parts.saver.announcements):
            # Whoever speaks in a round behind this name reads these announcements no more.
            of_restore.restores.add(ended)
        try:
            requested = wanted_step("restore", step)
            ending.wait_before_restore()
            tree = describe(state, "restore")
            placement = parts.saver.work.place(tree)
            wants = host_state is not None
            request = RestoreRequest(
                tree, state, requested, wants, placement.retained, tensors_only
            )
            value = HostStateRestore(of_restore, host_state, placement.buddies)
            ending.begin_restore()
        except Exception as error:
            ending.stop_announcing()  # else the others wait for the end of the leader's list
            refuse(of_restore.coordinator, name, of_restore.restores, error)
            raise
        return _Begun(request, placement, value)

    def _run(self, name: str, begun: _Begun) -> tuple[RestoredState | None, RestoreReport | None]:
        """Restore, and settle with the others; return None twice where there was nothing."""
        parts, of_restore, value = self._parts, self._parts.job, begun.value
        reports: list[RestoreReport | None] = []
        started_s = time.monotonic()
        try:
            with parts.held_steps():
                step = begun.request.requested_step
                parts.events.emit("restore.stage", stage="started", requested_step=step)
                restore = Restore(of_restore, begun.request, name, host_state=value)
                restored = restore.run()

            def settle() -> None:
                reports.append(restore.settle(restored, started_s=started_s))
                self._reserve(restored, begun.placement, value.size_bytes)

            # Returns when all have settled: nobody trains while a peer counts on a leftover.
            errors = run_on_all(
                parts.member.coordinator,
                f"{name}/ready",
                settle,
                parts.watch,
                parts.config.time_limits.patience_s,
                of_restore.restores,
            )
            if errors:
                raise RestoreFailed("settle", "what RAM holds", errors)
        except BaseException as error:
            value.undo()
            parts.events.emit("restore.failed", reason=str(error)[:500])
            raise
        (report,) = reports
        return restored, report

    def _continue_from(self, restored: RestoredState, *, is_requested: bool) -> None:
        """Let the saves to come follow the restored step."""
        parts, save, incarnation = self._parts, restored.save, restored.incarnation
        # Not ``restored.tier``, which may differ between processes.
        tier: TierName = PERSISTENT if restored.is_loaded else LOCAL
        parts.job.timelines.begin(save, incarnation, is_requested=is_requested)
        parts.saver.continue_from(save, incarnation, tier, leaves_newer=is_requested)
        parts.events.locate(incarnation=incarnation)
        if parts.preservation is not None:
            rejected = [passed.step for passed in restored.rejected if passed.tier == PERSISTENT]
            parts.preservation.mark_failed(rejected)
        if (chain := parts.job.stored_chain) is not None:
            chain.note_unreadable(p.step for p in restored.rejected if p.is_unreadable)
        parts.saver.expect_steps_after(save.step)

    def _reserve(
        self, restored: RestoredState | None, placement: ProcessPlacement, host_state_bytes: int
    ) -> None:
        """Reserve RAM for the saves to come. What was restored is used also where it has no room.

        RamdiskFull where nothing was restored.
        """
        lack = "" if restored is None else restored.lack
        try:
            self._parts.saver.work.use_placement(
                placement, host_state_bytes, reserve="now" if restored is None else "soon"
            )
        except RamdiskFull as error:
            if restored is None:
                raise
            lack = str(error)
        if restored is not None and lack and LOCAL in self._parts.config.save_plans():
            step, reason = restored.save.step, lack[:500]
            self._parts.events.emit("ram.off", cause="full", step=step, reason=reason)
