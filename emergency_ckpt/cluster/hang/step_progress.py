"""The step of this process, and the call of the checkpointer that it is in."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

from emergency_ckpt.core.hang import ProcessProgress

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_PLACE_LIMIT_CHARS = 200


class StepProgress:
    """Written by the training thread, read by any: each write is one assignment, without a lock."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._thread = threading.get_ident()
        self._now: tuple[int | None, str, float, float] = (None, "", 0.0, 0.0)

    def note(self, step: int) -> None:
        """Note that the loop is at ``step``; the same one again is no progress."""
        if step != self._step:
            self._step = step
            self._thread = threading.get_ident()
            self._now = (step, "", 0.0, time.monotonic())

    @contextlib.contextmanager
    def inside(self, call: str, limit_s: float) -> Generator[None]:
        """Hold that the process is in ``call``, which may wait ``limit_s`` for checkpoints."""
        self._now = (self._step, call, limit_s, time.monotonic())
        try:
            yield
        finally:
            self._now = (self._step, "", 0.0, time.monotonic())

    def restart(self) -> None:
        """Forget the step: a restore begins, and the step after it may be compiled first."""
        self._step = None
        self._now = (None, "", 0.0, time.monotonic())

    def read(self) -> ProcessProgress:
        """Return the progress at this moment."""
        step, call, limit_s, since_s = self._now
        return ProcessProgress(step, call, time.monotonic() - since_s, limit_s)

    def place(self) -> str:
        """Return the line of the program at which the training thread is, with its function.

        The innermost one that is of no library, or of all where every line is.
        """
        innermost = frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and _is_of_library(frame):
            frame = frame.f_back
        found = frame or innermost
        return "" if found is None else _text_of(found)


def _is_of_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((*_LIBRARIES, _PACKAGE, "<"))


def _text_of(frame: FrameType) -> str:
    code = frame.f_code
    text = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return text[:_PLACE_LIMIT_CHARS]
