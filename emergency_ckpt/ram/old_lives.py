"""Directories of a run's earlier lives, which others may hold: the wait, and their records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from absl import logging

from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.errors import CheckpointError, CorruptData, LocalTierError
from emergency_ckpt.ram.locks import Holder, process_directories
from emergency_ckpt.ram.process_files import NUMBERS, ProcessFiles

SETTLE_S = 5.0
"""Time for the writer of an invalid record to replace it, in seconds."""
_INSPECTION_S = 0.05
_READS = (
    "A job that only reads, beside the one that saves, has local_save_every=0 and save_every=0, or"
    " read_only=True in Orbax's options"
)

T = TypeVar("T")


def claim_or_wait(claim: Callable[[bool], T | Holder], run_id: str, wait_s: float) -> T:
    """Repeat ``claim`` until no process of another start holds the directory; return its result.

    ``claim`` is told whether ``SETTLE_S`` is over: its ``is_settled``.

    Raises:
      LocalTierError: the holder is this process, or still holds it after ``wait_s`` seconds. The
        error names the process, its host and the newest step that it holds.
    """
    begun_s = time.monotonic()
    has_warned = False
    while True:
        waited_s = time.monotonic() - begun_s
        result = claim(waited_s >= SETTLE_S)
        if not isinstance(result, Holder):
            return result
        limit_s = wait_s if result.is_certain else max(wait_s, SETTLE_S)
        if result.is_this_process or waited_s >= limit_s:
            raise _error(result, run_id, waited_s)
        if result.is_certain and not has_warned:
            has_warned = True
            logging.warning(
                "waiting up to %.3g s for an earlier life of run %r to end: %s holds %s. %s",
                limit_s,
                run_id,
                result.describe(),
                result.path,
                _READS,
            )
        time.sleep(_INSPECTION_S)


def _error(holder: Holder, run_id: str, waited_s: float) -> LocalTierError:
    if holder.is_this_process:
        return LocalTierError(
            "start",
            f"run {run_id!r} in {holder.path}",
            f"this process has a checkpointer of that run already ({holder.describe()})",
            hint=f"stop or close it first. {_READS}",
        )
    step = _newest_step(holder)
    newest_text = "no step" if step is None else f"step {step}"
    return LocalTierError(
        "start",
        f"run {run_id!r} in {holder.path}",
        f"an earlier life of the run is not over: {holder.describe()} holds the directory, with"
        f" {newest_text}, after {waited_s:.3g} s",
        hint=f"end that process; a start waits for it for most of twice stall_timeout_s. {_READS}",
    )


def greatest_number(run_dir: Path) -> int:
    """Return the greatest number of a life on record in any directory of a run on this ramdisk."""
    numbers = [0]
    for path in process_directories(run_dir):
        with contextlib.suppress(OSError, CorruptData), ProcessFiles.opened(path) as place:
            numbers.append(number_of(place.ledger().incarnation))
    return max(numbers)


def _newest_step(holder: Holder) -> int | None:
    """Return the newest step in another process's directory, or None when none can be read."""
    steps: list[int] = []
    with contextlib.suppress(OSError), ProcessFiles.opened(holder.path) as place:
        for number in NUMBERS:
            with contextlib.suppress(CheckpointError):
                published = place.manifest(number)
                steps += [published.save.step] if published else []
        with contextlib.suppress(CheckpointError):
            complete = place.ledger().complete
            steps += [complete.step] if complete else []
    return max(steps, default=None)
