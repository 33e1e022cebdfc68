"""The outcome of a persistent save: one value, set once by the first writer, for all processes.

Only the first writer knows whether the marker was written. What the others have done says nothing
of that, so they wait for its outcome, in the background.
"""

from __future__ import annotations

import threading

import msgspec

from emergency_ckpt.errors import CoordinationError, DeadlineExceeded, PeerLeft
from emergency_ckpt.save.persistent.keys import PersistentSaveKeys
from emergency_ckpt.save.persistent.reports import StageReport, raise_failure, report_of
from emergency_ckpt.types import SaveId

_STAGES = 4
"""So many stages, each with the timeout, lie between a process's own part and the outcome."""


class Outcomes:
    """Decides and learns outcomes. For the background thread, but where any thread is named."""

    def __init__(self, keys: PersistentSaveKeys, timeout_s: float) -> None:
        self._keys = keys
        self._timeout_s = timeout_s
        self._ending = threading.Event()
        self._is_learning = False

    @property
    def is_learning(self) -> bool:
        """Return whether this process waits for the first writer, its part done. Any thread."""
        return self._is_learning

    def decide(self, save: SaveId, error: str, *, kept: bool = False, pauses: bool = False) -> None:
        """Say how ``save`` ended: for the first writer. CoordinationError when nobody hears it.

        Of a failed save that error is left to the deadline of those who wait.
        """
        report = StageReport(error, pauses=pauses, kept=kept)
        try:
            self._keys.outcome(save).settle(msgspec.json.encode(report))
        except CoordinationError:
            if not error:
                raise

    def learn(self, save: SaveId, first_writer: int) -> bool:
        """Return when ``save`` is whole; whether it was so before. Blocks.

        PersistentTierError when it failed, SavePaused when it was left out; DeadlineExceeded when
        there is none.
        """
        limit_s = _STAGES * self._timeout_s

        def look() -> str:
            if self._ending.is_set():
                return "this process ends"
            return self._keys.absent(save, [first_writer]).get(first_writer, "")

        self._is_learning = True
        try:
            data = self._keys.outcome(save).wait(limit_s, look)
        except (DeadlineExceeded, PeerLeft) as error:
            reason = "" if isinstance(error, DeadlineExceeded) else f": {error.problem}"
            raise DeadlineExceeded(
                "learn the outcome of",
                f"step {save.step} in the persistent tier",
                f"the first writer has not said whether it is whole{reason}",
                missing=[f"process {first_writer}"],
            ) from error
        finally:
            self._is_learning = False
        report = report_of(data, "outcome", save.step, first_writer)
        if report.error:
            report = report.named(first_writer)
        raise_failure(report, save.step)
        return report.kept

    def end_waits(self) -> None:
        """Wait no longer, now or later. From any thread."""
        self._ending.set()
