"""The verdict on a run: built from events and digests alone."""

from __future__ import annotations

import io
import json

import pytest
from demo_support import (
    DIGEST,
    SLICE_LOSS,
    baseline,
    digest_with,
    event,
    faulty,
    faulty_events,
    restored,
    steps,
)
from rich.console import Console

from examples.demo import demo_report
from examples.demo.demo_report import FinishedRun, ScenarioVerdict, decide_verdict
from examples.demo.results import (
    JobDigest,
    ProcessResult,
    differences,
    merge_results,
)
from examples.demo.scenarios import SCENARIOS


def verdict(
    record: FinishedRun, scenario: str = "slice-loss", undisturbed: FinishedRun | None = None
) -> ScenarioVerdict:
    return decide_verdict(SCENARIOS[scenario], 2, undisturbed or baseline(), record)


@pytest.mark.parametrize(
    ("scenario", "record", "problem"),
    [
        ("slice-loss", faulty([restored(0, local=9), restored(1, local=9)]), "came from a peer"),
        (
            "slice-loss",
            faulty([restored(0, local=9), restored(1, peer=9, persistent=1)]),
            "1 bytes came from the persistent tier",
        ),
        (
            "slice-loss",
            faulty([restored(0, peer=9, tier="persistent"), restored(1, peer=9)]),
            "expected the local tier",
        ),
        ("slice-loss", faulty([restored(0, peer=9)]), "1 of 2 processes report a restore"),
        ("slice-loss", faulty([]), "0 of 2 processes report a restore"),
        (
            "slice-loss",
            faulty([restored(0, peer=9, step=20), restored(1, peer=9, step=15)]),
            "one restored step above 0",
        ),
        (
            "slice-loss",
            faulty([restored(0, peer=9, step=0), restored(1, peer=9, step=0)]),
            "one restored step above 0",
        ),
        ("slice-loss", faulty(finished=False), "did not finish"),
        (
            "slice-loss",
            faulty(events=[e for e in faulty_events(SLICE_LOSS) if e.name != "fault.fired"]),
            "never fired",
        ),
        ("all-ram-lost", faulty(), "no byte came from the persistent tier"),
        ("all-ram-lost", faulty(), "expected the persistent tier"),
        (
            "preemption",
            faulty([restored(0, local=9), restored(1, local=9)]),
            "was at step 23 and continued from 20",
        ),
    ],
)
def test_run_that_proves_less_is_not_recovered(
    scenario: str, record: FinishedRun, problem: str
) -> None:
    found = verdict(record, scenario)
    assert not found.summary["recovered"]
    assert not found.passed
    assert any(problem in line for line in found.problems), found.problems


def test_notice_costs_no_step_and_needs_no_peers() -> None:
    record = faulty([restored(p, local=9, step=23) for p in (0, 1)])
    assert verdict(record, "preemption").passed


def test_recovery_from_the_persistent_tier() -> None:
    moved = [restored(p, persistent=9, peer=9, tier="persistent") for p in (0, 1)]
    assert verdict(faulty(moved), "all-ram-lost").passed


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (faulty(digest=digest_with({"params/w[2:4]": "cc"})), "params/w[2:4] differs"),
        (faulty(digest=digest_with({"params/v[0:1]": "cc"})), "params/v[0:1] differs"),
        (
            faulty(digest=JobDigest(DIGEST.tensors, {0: "i0", 1: "other"}, ())),
            "iterator of process 1 differs",
        ),
        (
            faulty(digest=JobDigest(DIGEST.tensors, DIGEST.iterators, ("w: process 3 differs",))),
            "w: process 3 differs",
        ),
        (faulty(corpus=frozenset({"another text"})), "same text"),
        (faulty(digest=None), "two final states"),
    ],
)
def test_other_bits_are_not_equal(record: FinishedRun, problem: str) -> None:
    found = verdict(record)
    assert found.summary["recovered"]
    assert not found.summary["bitwise_equal"]
    assert not found.passed
    assert any(problem in line for line in found.problems), found.problems


def test_run_that_broke_off_has_a_whole_summary() -> None:
    summary = verdict(faulty(events=[], digest=None, finished=False)).summary
    assert summary["fault_step"] is None
    assert summary["restored_step"] is None
    assert summary["steps_lost"] is None
    assert summary["final_loss"] is None
    assert not summary["recovered"]
    json.dumps(summary)


def test_loss_of_a_step_done_twice_is_that_of_the_later_life() -> None:
    first_life = steps(0, 1, 3, start_s=0)
    second_life = [event(10 + step, "train.loss", life=1, step=step, loss=1.0) for step in (3, 4)]
    events = [*second_life, *first_life]
    assert demo_report.losses(events) == {1: 9.9, 2: 9.8, 3: 1.0, 4: 1.0}
    assert demo_report.losses(events, life=0) == {1: 9.9, 2: 9.8, 3: 9.7}


def test_document_of_all_scenarios() -> None:
    good, bad = verdict(faulty()), verdict(faulty([]))
    single = demo_report.summary_document([good], seconds=80.0, every=False)
    assert single == good.summary
    every = demo_report.summary_document([good, bad], seconds=123.45, every=True)
    assert every == {
        "recovered": False,
        "bitwise_equal": True,
        "seconds": 123.5,
        "scenarios": [good.summary, bad.summary],
    }


def test_table_names_every_scenario_and_every_failure() -> None:
    output = io.StringIO()
    console = Console(file=output, width=110)
    console.print(demo_report.summary_table([verdict(faulty()), verdict(faulty([]), "preemption")]))
    text = output.getvalue()
    good, bad = (
        next(line for line in text.splitlines() if name in line)
        for name in ("slice-loss", "preemption")
    )
    assert "NO" not in good
    assert "1000 B" in good
    assert "NO" in bad


def result(process: int, **changes: object) -> ProcessResult:
    values: dict[str, object] = {
        "process_index": process,
        "steps": 30,
        "loss": 7.0,
        "corpus": "text",
        "shards": {"w[0:2]": "aa"},
        "iterator": f"i{process}",
    }
    return ProcessResult(**(values | changes))  # type: ignore[arg-type]


def test_results_are_merged_whoever_holds_what() -> None:
    first = merge_results(
        [result(0), result(1, shards={"w[2:4]": "bb"}), result(2, shards={"w[0:2]": "aa"})]
    )
    second = merge_results(
        [result(2, shards={"w[2:4]": "bb"}), result(1), result(0, shards={"w[2:4]": "bb"})]
    )
    assert first == second
    assert differences(first, second) == []


def test_replicas_that_disagree_are_named() -> None:
    merged = merge_results([result(0), result(3, shards={"w[0:2]": "ab"})])
    assert merged.disagreements == ("w[0:2]: process 3 differs",)
    assert differences(merged, merged)


def test_long_lists_of_differences_are_cut() -> None:
    first = JobDigest({f"w{i}": "a" for i in range(30)}, {}, ())
    lines = differences(first, JobDigest({}, {}, ()), limit=4)
    assert len(lines) == 5
    assert lines[-1] == "and 26 more"
