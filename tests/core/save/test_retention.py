"""Retention keeps what is asked for, and the last complete step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.save.save_rules import (
    choose_removals,
    wanted_by_fields,
)

STEPS = st.lists(st.integers(0, 1000), unique=True).map(sorted)


@given(STEPS, st.data())
def test_unwanted_steps_go_but_never_the_last(steps: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    unwanted = [step for step, want in zip(steps, wanted, strict=True) if not want]
    assert choose_removals(steps, wanted) == tuple(s for s in unwanted if s != steps[-1])


def test_policy_must_answer_for_each_step() -> None:
    with pytest.raises(ValueError, match="1 of 2"):
        choose_removals([1, 2], [True])


@pytest.mark.parametrize(
    ("last_n", "every_n", "kept"),
    [
        (None, None, [10, 15, 20, 25, 30]),
        (2, None, [25, 30]),
        (1, 10, [10, 20, 30]),
        (9, 7, [10, 15, 20, 25, 30]),
    ],
)
def test_simple_fields(last_n: int | None, every_n: int | None, kept: list[int]) -> None:
    steps = [10, 15, 20, 25, 30]
    wanted = wanted_by_fields(steps, last_n, every_n)
    assert [step for step, want in zip(steps, wanted, strict=True) if want] == kept
