"""Removes persistent steps that no setting or policy keeps: in one process, in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Generator, Sequence

from absl import logging

from emergency_ckpt.background import (
    SAVE_NICENESS,
    BackgroundWorker,
    Failures,
    off_training_thread,
)
from emergency_ckpt.cluster.timelines import SOON_S, Timelines
from emergency_ckpt.config.policies import PreservationPolicy, wanted_steps
from emergency_ckpt.core.save.save_rules import StepRecord, choose_removals
from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.storage.directory_writer import DirectoryWriter


class Preservation:
    """Keeps the steps that the policy, or the simple fields, ask for, and the last complete step.

    ``after_save`` belongs to the background thread of persistent saves, the rest to the training
    thread. Policies are asked once for each save, by the process that published the save, which
    tells the others what is removed.
    """

    def __init__(
        self,
        writer: DirectoryWriter,
        failures: Failures,
        *,
        policy: PreservationPolicy | None,
        keep_last_n: int | None,
        keep_every_n_steps: int | None,
        timelines: Timelines | None = None,
        timeout_s: float,
    ) -> None:
        """``timeout_s``: the maximum time of a call to storage."""
        self._writer = writer
        self._timeout_s = timeout_s
        self._failures = failures
        self._policy = policy
        self._keep = keep_last_n, keep_every_n_steps
        self._timelines = timelines
        self._failed_steps: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        self._holders = 0
        self._is_removing = False
        self._let_go = 0  # how often ``let_go`` was called
        self._worker: BackgroundWorker | None = None
        if policy is not None or keep_last_n is not None:
            self._worker = BackgroundWorker("eckpt-preservation", failures, SAVE_NICENESS)

    def mark_failed(self, steps: Collection[int]) -> None:
        """Note steps that a restore found unusable: they are neither removed nor counted as kept.

        From any thread.
        """
        with self._changed:
            self._failed_steps |= frozenset(steps)

    def after_save(self, step: int | None = None) -> tuple[int, ...]:
        """After this process has published ``step``: begin to remove old steps, and return them.

        Does not wait for the removal, which follows one that is under way. Where the policy fails,
        or after ``stop``, nothing is removed. Never raises: the step counts.
        """
        with self._changed:
            self._failed_steps -= {step}
            let_go = self._let_go
        if self._worker is None:
            return ()
        try:
            steps = off_training_thread(self._unwanted)
        except Exception as error:  # noqa: BLE001 - the user's policy; saves go on
            text = f"{type(error).__name__}: {error}"
            failure = SaveFailed("remove", "old steps of the persistent tier", text)
            self._failures.record(failure, cause=error)
            return ()
        try:
            self._worker.submit_next(lambda: self._run(steps, let_go))
        except RuntimeError as error:
            logging.warning("no old step is removed from storage: %s", error)
            return ()
        return steps

    def let_go(self) -> None:
        """End a removal after its present step, and one that has not begun; do not wait for it.

        The next save looks again. For the end of a job, which has little time after a notice, and
        before a restore, which may return to a step that the removal was to take.
        """
        with self._changed:
            self._let_go += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Remove no step inside, where a restore may read any step.

        A removal under way ends with its present step. The restore waits for this end, but
        no longer than ``SOON_S``: if storage does not answer, the old step may still be removed
        inside. A restore must not hang on the removal, nor fail on one process alone.
        """
        with self._changed:
            self._holders += 1
            limit_s = min(self._timeout_s, SOON_S)
            if not self._changed.wait_for(lambda: not self._is_removing, limit_s):
                logging.warning("an old persistent step is still being removed; going on")
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the end of a removal; False when that takes longer than ``timeout_s``."""
        return self._worker is None or self._worker.wait_idle(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; steps not yet removed stay. False when it did not end in time."""
        self.let_go()
        return self._worker is None or self._worker.stop(timeout_s)

    def _run(self, steps: Sequence[int], let_go: int) -> None:
        """Remove ``steps``, until ``let_go`` is called once more than so often."""
        with self._changed:
            self._changed.wait_for(lambda: self._holders == 0 or self._let_go != let_go)
            self._is_removing = self._let_go == let_go
        try:
            for step in steps:
                with self._changed:
                    if self._holders or self._let_go != let_go:
                        return  # the next save looks again
                self._writer.retire(step)
        except PersistentTierError as error:  # a clean-up's error is never a save's
            logging.warning("old steps stay in storage: %s", error)
        finally:
            with self._changed:
                self._is_removing = False
                self._changed.notify_all()

    def _unwanted(self) -> tuple[int, ...]:
        """Return the steps that no setting or policy keeps."""
        table, lines = self._writer.table, self._timelines
        if table is None:
            return ()
        records = [
            StepRecord(entry.step, entry.saved_s, entry.metrics)
            for entry in table.counting()
            if not entry.is_plain
            and entry.step not in self._failed_steps
            and not (lines and lines.rejection_reason(entry.step, entry.incarnation))
        ]
        last_n, every_n = self._keep
        is_wanted = wanted_steps(
            records, self._policy, keep_last_n=last_n, keep_every_n_steps=every_n
        )
        return choose_removals([record.step for record in records], is_wanted)
