"""Waits for TensorStore, which end at a deadline."""

from __future__ import annotations

import time
from typing import Any

from emergency_ckpt.errors import DeadlineExceeded


def result_by(deadline_s: float, future: Any, item: str) -> Any:
    """Return the result of a read of TensorStore; DeadlineExceeded at ``deadline_s``. Blocks.

    No longer, because a daemon thread blocked in TensorStore at interpreter exit aborts the process
    as soon as storage answers. ``deadline_s``: of ``time.monotonic``.
    """
    try:
        return future.result(timeout=max(0.001, deadline_s - time.monotonic()))
    except TimeoutError as error:
        future.cancel()
        raise DeadlineExceeded("read", item, "storage did not deliver in time") from error
