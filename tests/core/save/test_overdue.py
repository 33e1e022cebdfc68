"""The time for a preemption notice, and what is done about one that no loop acts on."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.save.ending import Overdue, deadline_of, missed_text, overdue_work


@pytest.mark.parametrize(
    ("reached_s", "deadline_s"),
    [(100.0, 130.0), (119.0, 130.0), (125.0, 135.0), (190.0, 200.0)],
)
def test_loop_that_comes_late_has_a_third_of_the_grace(reached_s: float, deadline_s: float) -> None:
    assert deadline_of(100.0, 30.0, reached_s) == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("since_s", "done", "work"),
    [
        (14.9, (), ""),
        (15.0, (), "bring"),
        (16.0, ("bring",), ""),
        (26.9, ("bring",), ""),
        (27.0, ("bring",), "tell"),
        (27.0, (), "tell"),
        (60.0, ("bring", "tell"), ""),
    ],
)
def test_step_is_brought_first_and_the_loss_told_before_the_kill(
    since_s: float, done: tuple[Overdue, ...], work: Overdue
) -> None:
    assert overdue_work(since_s, 30.0, done) == work


def test_text_names_the_newest_step_of_each_tier() -> None:
    text = missed_text(27.2, 20, None, has_storage=True)
    assert text.startswith(
        "a preemption notice came 27 s ago, and this process's loop has not come"
    )
    assert "The newest in RAM is step 20, in storage none. " in text
    assert "in storage" not in missed_text(27.2, 20, None, has_storage=False)
