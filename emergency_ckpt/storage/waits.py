"""Waits for TensorStore."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from emergency_ckpt.work_progress import WorkProgress

NOT_IN_TIME = "storage did not deliver in time"
_POLL_S = (0.0005, 0.02)


def result_by(progress: WorkProgress, future: Any, item: str) -> Any:
    """Return the result of a read of TensorStore; it is a sign of progress. Blocks.

    DeadlineExceeded when nothing moves any more. No longer, because a daemon thread blocked in
    TensorStore at interpreter exit aborts the process as soon as storage answers.
    """
    while True:
        try:
            result = future.result(timeout=progress.left_s)
        except TimeoutError as error:
            if time.monotonic() < progress.deadline_s:
                continue
            future.cancel()
            raise progress.error("read", item, NOT_IN_TIME) from error
        progress.touch()
        return result


def wait_for(future: Any, is_over: Callable[[], bool] = lambda: False) -> None:
    """Block until TensorStore's ``future`` is done, or ``is_over`` returns True.

    A daemon thread that is blocked in TensorStore at interpreter exit aborts the process as soon as
    storage answers. So this one only looks, again and again.
    """
    pause_s, longest_s = _POLL_S
    while not future.done() and not is_over():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def result_of(future: Any) -> Any:
    """Return the result of TensorStore's ``future``. Blocks, for as long as storage does."""
    wait_for(future)
    return future.result()
