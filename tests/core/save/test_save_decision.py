"""When to save, and when a save counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.save.save_rules import StepRules, decide_vote, is_due, skip_reason
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
    ("expected", "published", "refused", "complete", "reason"),
    [
        ([0, 1], [1, 0], [], True, "all 2 processes published"),
        ([0, 1], [0], [], False, "process 1 did not publish"),
        ([0, 1, 2], [0], [2], False, "process 2 refused; process 1 did not publish"),
        ([0, 1], [0, 1], [1], False, "process 1 refused"),
        ([], [0], [], False, "no process was expected to publish"),
    ],
)
def test_vote(
    expected: list[int], published: list[int], refused: list[int], complete: bool, reason: str
) -> None:
    assert decide_vote(expected, published, refused) == (complete, reason)


def test_long_list_of_absent_processes_is_cut() -> None:
    _, reason = decide_vote(range(10_000), [], [])
    assert reason == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 9992 more did not publish"


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_vote_is_complete_when_all_published_and_none_refused(
    expected: set[int], published: set[int], refused: set[int]
) -> None:
    complete = bool(expected) and expected <= published and not expected & refused
    assert decide_vote(expected, published, refused)[0] == complete


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
