"""The pause after failed saves, and how often a failure is mentioned."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.save.timing import Repeats, backoff_s


@pytest.mark.parametrize(
    ("failures", "pause_s"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (10, 256), (11, 300), (10_000, 300)],
)
def test_backoff_pause_doubles_up_to_its_bound(failures: int, pause_s: float) -> None:
    assert backoff_s(failures) == pause_s


def test_repeats_counts_between_mentions() -> None:
    repeats = Repeats()
    assert repeats.occurred("full", 0.0) == 0
    assert [repeats.occurred("full", 1.0 + n) for n in range(50)] == [None] * 50
    assert repeats.occurred("reset", 51.0) == 0
    assert repeats.occurred("full", 60.0) == 51
    assert repeats.occurred("full", 61.0) is None
    assert repeats.occurred("full", 1000.0) == 2


def test_repeats_forgets_what_is_silent_for_longest() -> None:
    repeats = Repeats()
    for key in ("a", "b", "a", *(f"c{number}" for number in range(63))):
        repeats.occurred(key, 0.0)
    assert repeats.occurred("a", 1.0) is None
    assert repeats.occurred("b", 1.0) == 0
