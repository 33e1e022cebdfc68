"""A restore together with the saves around it: held up before, continued from its step after."""

from __future__ import annotations

import time

from emergency_ckpt.cluster.process_placement import ProcessPlacement
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.errors import RamdiskFull, RestoreFailed
from emergency_ckpt.restore.host_state import HostStateRestore
from emergency_ckpt.restore.request import RestoredState, RestoreReport, RestoreRequest
from emergency_ckpt.restore.restore import Restore
from emergency_ckpt.restore.rounds import refuse
from emergency_ckpt.start import Opened
from emergency_ckpt.state.tree import PyTree, describe
from emergency_ckpt.types import LOCAL, PERSISTENT, TierName


class Resume:
    """Restores of one checkpointer. For the training thread.

    Neither ``save`` nor ``restore`` knows the other: what one has to learn from the other passes
    through here.
    """

    def __init__(self, parts: Opened) -> None:
        self._parts = parts
        self._restores = 0

    def restore(
        self, state: PyTree, host_state: object, step: int | None, *, tensors_only: bool
    ) -> tuple[RestoredState, RestoreReport] | None:
        """Restore ``step``, and let saves go on from it. Collective; blocks.

        0. Saves in progress end. An error before 1 is told to the others, which wait for this one.
        1. Saves are held up.
        2. ``Restore.run`` brings the step, or finds that there never was one.
        3. All settle: leftovers of saves are forgotten, RAM is reserved for the saves to come.
        4. Saves continue from the step.

        Returns None where there was nothing to restore; raises as the caller's own ``restore``.
        """
        parts, of_restore = self._parts, self._parts.restore_parts
        name, is_first = f"restore/{self._restores}", self._restores == 0
        self._restores += 1
        try:
            parts.saver.ending.wait_before_restore()
            tree = describe(state, "restore")
            placement = parts.saver.work.place(tree)
            wants = host_state is not None
            request = RestoreRequest(tree, state, step, wants, placement.retained, tensors_only)
            value = HostStateRestore(of_restore, host_state, placement.buddies)
        except Exception as error:
            refuse(of_restore.coordinator, name, of_restore.series, error)
            raise
        reports: list[RestoreReport | None] = []
        started_s = time.monotonic()
        parts.saver.ending.begin_restore()
        try:
            with parts.held_steps():
                parts.events.emit("restore.stage", stage="started", requested_step=step)
                restore = Restore(of_restore, request, name, host_state=value)
                restored = restore.run()

            def settle() -> None:
                reports.append(restore.settle(restored, started_s=started_s))
                self._reserve(restored, placement, value.size_bytes)

            # Returns when all have settled: nobody trains while a peer counts on a leftover.
            errors = run_on_all(
                parts.member.coordinator,
                f"{name}/ready",
                settle,
                parts.watch,
                parts.config.time_limits.patience_s,
                of_restore.series,
            )
            if errors:
                raise RestoreFailed("settle", "what RAM holds", errors)
        except BaseException as error:
            value.undo()
            parts.events.emit("restore.failed", reason=str(error)[:500])
            raise
        finally:
            parts.saver.ending.end_restore()
        (report,) = reports
        if restored is None or report is None:
            parts.restore_parts.timelines.note_continuation()
            parts.saver.expect_steps_after(-1)
            if is_first:
                parts.tell_begins_anew()
            return None
        self._continue_from(restored, is_requested=step is not None)
        return restored, report

    def _continue_from(self, restored: RestoredState, *, is_requested: bool) -> None:
        """Let the saves to come follow the restored step."""
        parts, save, incarnation = self._parts, restored.save, restored.incarnation
        # Not ``restored.tier``, which may differ between processes.
        tier: TierName = PERSISTENT if restored.is_loaded else LOCAL
        parts.restore_parts.timelines.begin(save, incarnation, is_requested=is_requested)
        parts.saver.continue_from(save, incarnation, tier, leaves_newer=is_requested)
        parts.events.locate(incarnation=incarnation)
        if parts.preservation is not None:
            rejected = [passed.step for passed in restored.rejected if passed.tier == PERSISTENT]
            parts.preservation.mark_failed(rejected)
        if (chain := parts.restore_parts.stored_chain) is not None:
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
        if restored is not None and lack and not self._parts.config.only_reads:
            step, reason = restored.save.step, lack[:500]
            self._parts.events.emit("ram.off", cause="full", step=step, reason=reason)
