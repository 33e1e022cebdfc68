"""Progress of long work: a line each ten seconds, on standard error."""

from __future__ import annotations

import sys
import time

from emergency_ckpt.core.wording import seconds_text, size_text
from emergency_ckpt.tools.cli.output import tell

_LINE_EVERY_S = 10.0


class ProgressLines:
    """Is called with the bytes that were done since the last call, of ``total_bytes``."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begin_s = self._last_s = time.monotonic()

    def __call__(self, count: int) -> None:
        """Print a line when ten seconds have passed since the last one."""
        self._done_bytes += count
        now_s = time.monotonic()
        if now_s - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = now_s
        rate = self._done_bytes / (now_s - self._begin_s)
        left_s = max(self._total_bytes - self._done_bytes, 0) / max(rate, 1)
        tell(
            f"{self._what}: {size_text(self._done_bytes)} of {size_text(self._total_bytes)},"
            f" {size_text(round(rate))}/s, {seconds_text(left_s)} left",
            sys.stderr,
        )
