"""Saves announced in the background, to four real processes with clocks minutes apart.

One process is slow, steps take a few milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, of, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    with job_root() as root:
        yield run_life(spec_of(root, "continuous_job.py"), root)


def check_announced(seen: list[Any], least: int) -> None:
    complete = [set(s["complete"]) for s in seen]
    assert len(complete[0]) >= least, seen[0]
    everywhere = set.intersection(*(set(s["published"]) for s in seen))
    assert set.union(*complete) <= everywhere
    assert all(steps == complete[0] for steps in complete)
    # A save is incomplete where a process was late, and for no other reason. Each late process
    # doubles the lead, and a save shortens it by 3%: one in 23 is late at most, in the long run.
    started = [set(s["started"]) for s in seen]
    partial = set.union(*started) - set.intersection(*started)
    late = set().union(*(s["late"] for s in seen))
    incomplete = set().union(*(s["incomplete"] for s in seen))
    assert partial | incomplete <= late
    assert len(late) <= max(3, len(complete[0]) / 8), late


def check_restored(seen: list[Any]) -> None:
    """``stored``: in storage, as a writer of slice 0 knows; the newest may be there alone."""
    newest = max(seen[0]["complete"] + seen[0]["stored"])
    assert [s["restored"] for s in seen] == [newest] * 4
    assert [s["right"] for s in seen] == [True] * 4


def test_continuous_saves_are_the_same_everywhere(results: Results) -> None:
    seen = of(results, "continuous")
    check_announced(seen, 50)
    check_restored(seen)


@pytest.mark.parametrize(
    "program", ["continuous", "adaptive", "users_own", "every_second", "stride_100"]
)
def test_training_thread_calls_no_other_process(results: Results, program: str) -> None:
    assert [s["calls"] for s in of(results, program)] == [[]] * 4


def test_late_process_costs_a_save_and_no_error(results: Results) -> None:
    """In each tier; who has a failure raises it at the end of the job."""
    seen = of(results, "late")
    assert seen[2]["late"]
    assert len(seen[0]["complete"]) >= 20
    assert seen[0]["stored"]
    check_restored(seen)


def test_both_tiers_save_on_their_own(results: Results) -> None:
    """And what is decided from the step alone is saved besides."""
    seen = of(results, "both_tiers")
    assert {7, 70} <= set(seen[0]["complete"])
    check_restored(seen)
    assert all(1 <= len(s["kept"]) <= 3 for s in seen), [s["kept"] for s in seen]


def test_adaptive_saves_are_the_same_everywhere(results: Results) -> None:
    seen = of(results, "adaptive")
    check_announced(seen, 10)
    check_restored(seen)


def test_users_policy_is_asked_for_each_step_by_the_leader_alone(results: Results) -> None:
    seen = of(results, "users_own")
    check_announced(seen, 10)
    # What it wants too soon to be announced is made good a little later.
    exact = [step for step in seen[0]["complete"] if step % 13 == 0]
    assert len(exact) > len(seen[0]["complete"]) / 2
    gaps = [b - a for a, b in itertools.pairwise(exact)]
    # Steps that go by while the lead is being found are missed, also when one process was slow.
    assert all(gap % 13 == 0 for gap in gaps), gaps
    assert gaps[5:].count(13) >= 0.8 * len(gaps[5:]), gaps
    assert [s["asked_in"] for s in seen] == [["eckpt-announcements"], [], [], []]


@pytest.mark.parametrize(
    ("program", "stride", "least"),
    [("stride_10", 10, 50), ("stride_100", 100, 50), ("seconds_at_stride_100", 100, 5)],
)
def test_saves_at_long_strides_are_as_many(
    results: Results, program: str, stride: int, least: int
) -> None:
    """Steps that rise by ten or a hundred per call cost a policy by the clock no save."""
    seen = of(results, program)
    check_announced(seen, least)
    assert all(step % stride == 0 for step in seen[0]["complete"])
    check_restored(seen)


def test_users_policy_at_a_stride_saves_what_it_wants(results: Results) -> None:
    """Each thirteenth call, from the first on; what came too soon is made good later."""
    seen = of(results, "users_own_at_stride_10")
    check_announced(seen, 10)
    complete = seen[0]["complete"]
    exact = [step for step in complete if step % 130 == 0]
    assert len(exact) > len(complete) / 2, complete
    check_restored(seen)


def test_every_so_many_seconds(results: Results) -> None:
    seen = of(results, "every_second")
    check_announced(seen, 5)
    check_restored(seen)
