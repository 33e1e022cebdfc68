"""When a save is due by the clock."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.save.timing import (
    Continuous,
    EverySeconds,
    TierStatus,
)

IDLE = TierStatus(False, True, 10.0, 0.1, 1.0, 0.5)


@pytest.mark.parametrize(
    ("rule", "status", "due"),
    [
        (Continuous(), IDLE, True),
        (Continuous(), IDLE._replace(busy=True), False),
        (Continuous(minimum_interval_s=20), IDLE, False),
        (Continuous(minimum_interval_s=20), IDLE._replace(since_last_s=20.0), True),
        (Continuous(minimum_interval_s=20), IDLE._replace(has_saved=False), True),
        (EverySeconds(interval_s=20), IDLE._replace(has_saved=False), False),
        (EverySeconds(interval_s=20), IDLE._replace(since_last_s=20.0, busy=True), False),
        (EverySeconds(interval_s=20), IDLE._replace(since_last_s=20.5), True),
    ],
)
def test_due(rule: Continuous, status: TierStatus, due: bool) -> None:
    assert rule.due(status) is due
