"""When to save, and what is said of a save that is skipped."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.save.save_rules import StepRules, is_due, skip_reason
from emergency_ckpt.types import TierName


@pytest.mark.parametrize(
    ("step", "every", "last", "is_wanted"),
    [
        (0, 5, None, True),
        (10, 5, 5, True),
        (10, 5, 10, False),
        (11, 5, 10, False),
        (0, 0, None, False),
    ],
)
def test_fixed_interval(step: int, every: int, last: int | None, is_wanted: bool) -> None:
    assert is_due(StepRules(intervals=(every,)), step, last) is is_wanted


@pytest.mark.parametrize(
    ("tier", "waits", "problem", "hint"),
    [
        ("local", False, "has not ended within 5 s", "save to RAM less often"),
        ("persistent", False, "has not ended within 5 s", "why storage"),
        ("local", True, "still waits for other processes", "all processes call save"),
        ("persistent", True, "still waits for other processes", "all processes call save"),
    ],
)
def test_skip_reason_gives_advice_that_fits(
    tier: TierName, waits: bool, problem: str, hint: str
) -> None:
    told, advice = skip_reason(tier, 5.0, waits_for_others=waits)
    assert problem in told
    assert hint in advice


def test_skip_reason_without_a_wait_names_none() -> None:
    for waits in (False, True):
        assert "0 s" not in skip_reason("persistent", 0.0, waits_for_others=waits)[0]
