"""Progress of long work: a bar on a terminal, else a line each ten seconds. On standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from emergency_ckpt.core.wording import seconds_text, size_text
from emergency_ckpt.tools.cli.output import HAS_RICH, tell

_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress_of(what: str, total_bytes: int) -> Generator[Callable[[int], None]]:
    """Show the progress of some bytes while inside; yields the function that is told of them."""
    if sys.stderr.isatty() and HAS_RICH:
        with _bar(what, total_bytes) as advance:
            yield advance
    else:
        yield _Lines(what, total_bytes)


@contextlib.contextmanager
def _bar(what: str, total_bytes: int) -> Generator[Callable[[int], None]]:
    # Imported here: most output goes to no terminal.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total_bytes)
        yield lambda count: shown.advance(task, count)


class _Lines:
    """One line each ten seconds, for logs."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begin_s = self._last_s = time.monotonic()

    def __call__(self, count: int) -> None:
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
