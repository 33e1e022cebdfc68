"""A restore as the caller sees it: restore the state, apply the host state, settle the RAM."""

from __future__ import annotations

import time
from collections.abc import Sequence

from absl import logging

from emergency_ckpt.core.restore.plan_types import NoPlan, Rejection
from emergency_ckpt.core.wording import TIER_WORDS
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.restore.execution import RestoreExecution
from emergency_ckpt.restore.prefetch import Prefetch
from emergency_ckpt.restore.protocol import PlanFailed, RestoreReport, no_plan_error
from emergency_ckpt.restore.request import RestoredState, RestoreParts, RestoreRequest
from emergency_ckpt.restore.restored_host_state import HostStatePush, apply_host_state
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.types import SaveId

_MOST_PASSED_OVER = 8


class _HostState:
    """The caller's non-tensor state, as one ``Attempt``: what moved can be moved back."""

    def __init__(self, parts: RestoreParts, value: object, buddies: Sequence[int]) -> None:
        self._parts = parts
        self._push = HostStatePush(parts.tier, parts.peers, parts.events, buddies)
        self._value = value
        self._before = host_states.capture(value)
        self._moved = False
        self.restored: object = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of a document of the value as it was before."""
        return host_states.size_of(self._before)

    def check(self) -> None:
        """Nothing ends a restore from outside."""

    def apply_host_state(self, restored: RestoredState) -> None:
        parts = self._parts
        # The step is whole, whatever becomes of this attempt: a copy of it does no harm.
        self._push.start(restored.save, parts.process)
        if self._value is None:
            return
        self._moved = True
        self.restored = apply_host_state(
            self._value, restored.documents, parts.config.host_state_remap, parts.process
        )

    def finish(self) -> None:
        """Wait for the pushes to the buddies: the attempt was the last one."""
        self._push.wait()

    def undo(self) -> None:
        self._push.wait()
        if self._moved:
            host_states.apply(self._value, self._before)
            self._moved = False


class Restore:
    """One restore: ``run``, which is collective, then ``settle``; each once, on all processes.

    Args:
      number: the same everywhere.
      prefetch: of this process, for this restore or for another one.

    Attributes:
      restored: set by ``settle``, with ``report``; None when there was nothing to restore.
    """

    def __init__(
        self,
        parts: RestoreParts,
        request: RestoreRequest,
        *,
        host_state: object,
        buddies: tuple[int, ...],
        number: int,
        keep_newer: bool = False,
        prefetch: Prefetch | None,
    ) -> None:
        self._parts = parts
        self._request = request
        self._keep_newer = keep_newer
        self._prefetch = prefetch
        self._started_s = time.monotonic()
        ready = prefetch if prefetch is not None and prefetch.wait_for_state() else None
        self._execution = RestoreExecution(parts, request, f"restore/{number}", ready)
        self._host_state = _HostState(parts, host_state, buddies)
        self._found: RestoredState | None = None
        self.restored: RestoredState | None = None
        self.report: RestoreReport | None = None

    def run(self) -> None:
        """Restore the newest whole step, if there ever was one.

        Raises the same kind of error on every process, and then leaves the host state as it was.
        """
        try:
            self._run()
        except BaseException:
            self.undo()
            raise
        finally:
            if self._prefetch is not None:
                # Also what was used: it is given once.
                self._prefetch.cancel("the restore ended without it")
                if self._found is None or not self._found.is_prefetched:
                    reason = self._prefetch.cancelled_for
                    self._parts.events.emit("prefetch.unused", reason=reason)

    @property
    def host_state_bytes(self) -> int:
        """Return the size of this process's host state, as far as it is known."""
        return self._host_state.size_bytes

    def undo(self) -> None:
        """Put the host state back to where it was before ``run``."""
        self._host_state.undo()

    def settle(self) -> None:
        """Forget what is newer than the step of ``run``, and set ``restored``.

        Not collective, nor are its errors: all processes must learn of them, and no process may
        train before all have done this.
        """
        tier = self._parts.tier
        if self._found is None:
            self._parts.timelines.note_continuation()
            # Leftovers of saves that never became whole must not mix with later saves.
            tier.invalidate_newer(SaveId(-1, "", self._parts.config.run_name))
            self._parts.events.emit("restore.nothing")
            return
        restored = self._found
        # No leftover of another life may look newer than the step that training continues from.
        if not self._keep_newer:
            tier.invalidate_newer(restored.save, restored.timeline)
        if restored.gathered is not None:
            # All processes have gathered what they keep; peers need nothing more from here.
            tier.keep_only(restored.save, restored.gathered)
        self._begin_life(restored)
        self._note_complete(restored.save)
        self._host_state.finish()
        self.report = self._finished(restored)
        self.restored = restored

    def _begin_life(self, restored: RestoredState) -> None:
        parts, asked = self._parts, self._request.requested_step is not None
        at_once = asked and not self._keep_newer
        parts.timelines.begin(
            restored.timeline, restored.save, restored.incarnation, at_once=at_once
        )
        if at_once and parts.process[0] == 0 and parts.stored_chain is not None:
            parts.stored_chain.follow_soon(restored.incarnation)

    def _note_complete(self, save: SaveId) -> None:
        """Record that ``save`` is complete. A failure is logged and ends nothing, as after a save.

        The step is whole without the record, which only tells a loss of everything from a fresh
        start. A ramdisk that others have filled must not prevent a restore from RAM.
        """
        try:
            self._parts.tier.note_complete(save)
        except (CheckpointError, OSError) as error:
            logging.warning("step %d is not on record as complete: %s", save.step, error)
            self._parts.events.emit(
                "restore.note", text=f"step {save.step} is not on record as complete: {error}"
            )

    def _run(self) -> None:
        self._parts.events.emit("restore.started", requested_step=self._request.requested_step)
        outcome = self._execution.run(self._host_state)
        if isinstance(outcome, NoPlan | PlanFailed):
            self._without_plan(outcome)
        else:
            self._found = outcome

    def _finished(self, restored: RestoredState) -> RestoreReport:
        tally, prefetch = restored.tally, self._prefetch
        overlapped_s = 0.0
        if prefetch is not None and restored.is_prefetched:
            overlapped_s = prefetch.seconds_until(self._started_s)
        report = RestoreReport(
            step=restored.step,
            tier=restored.tier,
            seconds=time.monotonic() - self._started_s,
            overlapped_seconds=overlapped_s,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
            bytes_persistent=tally.persistent,
            host_state=self._host_state.restored,
            rejected=restored.rejected,
        )
        self._parts.events.emit(
            "restore.finished",
            step=report.step,
            tier=report.tier,
            seconds=report.seconds,
            overlapped_seconds=report.overlapped_seconds,
            bytes_local=report.bytes_local,
            bytes_peer=report.bytes_peer,
            bytes_persistent=report.bytes_persistent,
            passed_over=_passed_over(report.rejected),
        )
        return report

    def _without_plan(self, answer: NoPlan | PlanFailed) -> None:
        if isinstance(answer, PlanFailed):
            raise self._execution.dialogue.failure(answer)
        for note in answer.notes:
            self._parts.events.emit("restore.note", text=note)
        for each in answer.rejected:
            self._parts.events.emit(
                "restore.rejected", step=each.step, tier=each.tier, reason=each.reason
            )
        if answer.kind != "nothing":
            raise no_plan_error(answer, f"run {self._parts.config.run_name!r}")


def _passed_over(rejected: Sequence[Rejection]) -> str:
    """Each newer step that was not restored, and why; empty without any."""
    texts = [f"step {each.step} in {TIER_WORDS[each.tier]} ({each.reason})" for each in rejected]
    hidden = len(texts) - _MOST_PASSED_OVER
    more = [f"and {hidden} more"] if hidden > 0 else []
    return "; ".join([*texts[:_MOST_PASSED_OVER], *more])
