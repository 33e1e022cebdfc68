"""The name of a life of the job, new at each start and each restore."""

from __future__ import annotations

import re
import secrets
import time

from emergency_ckpt.core.limits import MAX_TIME_MS

_CLOCK = re.compile(r"([0-9a-f]{12})-")


def new_incarnation(after: str = "") -> str:
    """Return a fresh id that sorts by this machine's clock and after ``after``."""
    now_ms = time.time_ns() // 1_000_000
    earlier = _CLOCK.match(after)
    if earlier is not None:
        # With a slow clock a later life must still sort later; a clock far ahead must leave room
        # for later lives.
        now_ms = max(now_ms, min(int(earlier[1], 16) + 1, MAX_TIME_MS))
    return f"{now_ms:012x}-{secrets.token_hex(8)}"
