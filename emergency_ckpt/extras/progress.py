"""The progress of a process, in a file that the process and ``eckpt launch`` map as shared memory.

``StepReports`` is an observer, which ``eckpt launch`` asks for by ECKPT_OBSERVERS: a loop that
calls the checkpointer after each step reports nothing itself. A program without a checkpointer
calls ``report_step``.

The file holds two 8-byte signed integers in the machine's byte order (both sides run on one
machine): the last step that the process reported, and the step at which it must wait for an exact
fault. Each is read and written as one aligned word, so neither side reads a partial value.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from pathlib import Path

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.observer import JobView, Observer

PATH_VARIABLE = "ECKPT_PROGRESS_PATH"
"""Set by the supervisor: ``JobEnvironment.progress_path``."""

NO_STEP = -1
"""No step was reported; as a hold: do not wait."""

HOLD_LIMIT_S = 60.0
"""Maximum time in seconds that a process waits for a fault, since its supervisor may have died."""

_HOLD_POLL_S = 0.002
_STEP, _HOLD = 0, 1
_SIZE_BYTES = 16


class ProgressFile:
    """The mapped progress file of one process. One writer per side."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the file at ``path``.

        Args:
          create: make the file (the supervisor's side); otherwise it must exist.

        Raises:
          OSError: it cannot be opened, or is too short.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, _SIZE_BYTES)
            elif os.fstat(descriptor).st_size != _SIZE_BYTES:
                raise OSError(f"{path} is not a progress file: it must have {_SIZE_BYTES} bytes")
            self._mapping = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._mapping).cast("q")
        if create:
            self._words[_STEP] = NO_STEP
            self._words[_HOLD] = NO_STEP

    @property
    def step(self) -> int:
        """Return the last reported step, ``NO_STEP`` before the first."""
        return self._words[_STEP]

    def report(self, step: int) -> None:
        """Write ``step``, in about 100 ns. Blocks, bounded, after a hold at or before ``step``."""
        self._words[_STEP] = step
        if NO_STEP < self._words[_HOLD] <= step:
            deadline_s = time.monotonic() + HOLD_LIMIT_S
            while NO_STEP < self._words[_HOLD] <= step and time.monotonic() < deadline_s:
                time.sleep(_HOLD_POLL_S)

    def hold_at(self, step: int) -> None:
        """Make the process wait in ``report(step)``, or later; ``NO_STEP`` lets it continue."""
        self._words[_HOLD] = step

    def close(self) -> None:
        """Unmap the file; it stays on disk."""
        self._words.release()
        self._mapping.close()


def report_step(step: int) -> None:
    """Report to the supervisor that this process has reached ``step``.

    Call it once per step, at the end. It is one memory write (about 0.2 us), never a system call,
    and does nothing without a supervisor. It blocks only for an ``exact`` fault at this step, for
    at most ``HOLD_LIMIT_S`` seconds.

    Raises:
      OSError: the progress file cannot be mapped (first call only).
    """
    progress = _progress_of_process()
    if progress is not None:
        progress.report(step)


@functools.cache
def _progress_of_process() -> ProgressFile | None:
    """Return the file that the supervisor has made; None without a supervisor."""
    path = os.environ.get(PATH_VARIABLE)
    return ProgressFile(Path(path)) if path else None


class StepReports(Observer):
    """Reports each step of the loop to the supervisor once the loop has named the step after it.

    By then the loop has done all that belongs to the step: an ``exact`` fault finds the process
    between two steps.
    """

    def join(self, job: JobView) -> None:
        """Watch the steps of the loop."""
        done: list[int] = []

        def finished(step: int) -> None:
            if done:
                report_step(done.pop())
            done.append(int(step))

        job.progress.watch(finished)


def from_text(argument: str) -> StepReports:
    """Return the observer of the text ``"progress"``. ConfigError with an argument."""
    if argument:
        raise ConfigError([f"the observer progress takes no argument, not {argument!r}"])
    return StepReports()
