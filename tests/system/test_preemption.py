"""Jobs that are told to leave, or killed while they save all the time, and start again.

Four real processes under the supervisor. Each writes down what it saw, as it saw it.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launch_support import JobSpec, Supervisor, supervisor_of
from running_jobs import job_root, spec_of

COUNT = 4
TIMEOUT_S = 200.0
LAST = 250
PACE_S = 0.015
"""Each process looks for a notice once a second: the steps in between must not run out."""
Seen = list[list[dict[str, Any]]]


class Lives:
    """What the processes of each life wrote down."""

    def __init__(self, root: Path, count: int) -> None:
        self.seen: list[Seen] = [
            [_lines(root / f"seen_{life}_{process}.jsonl") for process in range(COUNT)]
            for life in range(count)
        ]

    def values(self, life: int, key: str) -> list[Any]:
        """What each process of ``life`` wrote under ``key``; None where it did not get so far."""
        return [
            next((line[key] for line in lines if key in line), None) for lines in self.seen[life]
        ]

    def steps(self, life: int, event: str) -> list[set[int]]:
        return [
            {line["step"] for line in lines if line.get("event") == event}
            for lines in self.seen[life]
        ]

    def check_resumed(self, life: int, step: int) -> None:
        assert self.values(life, "restored") == [step] * COUNT
        assert self.values(life, "right") == [True] * COUNT


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().split("\n")[:-1]  # a killed process may leave half a line
    return [json.loads(line) for line in whole]


def run(root: Path, last: int, *faults: str, **settings: Any) -> Lives:
    """Run a job to step ``last``, restarted as often as need be."""
    spec = spec_of(root, "continuous_job.py", "life", str(last), json.dumps(settings))
    # A process that leaves after a notice ends no other process that still saves.
    spec = dataclasses.replace(spec, grace_s=JobSpec.grace_s)
    supervisor = supervisor_of(spec, *faults)
    result = supervisor.run(TIMEOUT_S)
    assert result.error is None, result.error
    lives = Lives(root, len(result.lives))
    assert lives.values(len(result.lives) - 1, "finished") == [last] * COUNT
    return lives


@pytest.mark.slow
def test_last_whole_step_survives_a_kill_at_any_moment() -> None:
    with job_root() as root:
        faults = (
            "step=80 kill=process:1",
            "step=170 kill=slice:1 lose-ram",
            "step=260 kill=process:0",
            "step=350 kill=all",
        )
        # Saves are announced a tenth of a second ahead: 80 steps without a pace may take less.
        lives = run(root, 400, *faults, continuous=True, pace_s=PACE_S)
        assert len(lives.seen) == len(faults) + 1
        for life in range(len(faults)):
            complete = set().union(*lives.steps(life, "save.complete"))
            assert complete, "there was no save to lose"
            (restored,) = set(lives.values(life + 1, "restored"))
            assert restored >= max(complete)
            lives.check_resumed(life + 1, restored)


@pytest.mark.core
@pytest.mark.parametrize("exits_by_itself", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_save_one_step_in_both_tiers_and_resume_there(exits_by_itself: bool) -> None:
    with job_root() as root:
        lives = run(
            root,
            LAST,
            "step=33 kill=process:1 signal=TERM exact",
            pace_s=PACE_S,
            dir=str(root / "persistent"),
            local_save_every=LAST,
            on_preemption="exit" if exits_by_itself else "save",
            preemption_grace_s=120.0,
        )
        (at,) = lives.steps(0, "preemption.reached")[0]
        assert 33 < at < LAST
        assert lives.steps(0, "preemption.reached") == [{at}] * COUNT
        assert lives.values(0, "left_at") == [None if exits_by_itself else at] * COUNT
        assert all(at in steps for steps in lives.steps(0, "save.complete"))
        assert lives.steps(0, "persistent.complete") == [{at}] * COUNT
        assert lives.steps(0, "preemption.missed.not_written") == [set()] * COUNT
        lives.check_resumed(1, at)


def test_stop_of_the_launcher_costs_no_agreed_step() -> None:
    """Steps take longer than the second that a stop had once."""
    with job_root() as root:
        settings = {"pace_s": 3.0, "dir": str(root / "persistent"), "save_every": 10_000}
        spec = spec_of(root, "continuous_job.py", "life", "10000", json.dumps(settings))
        supervisor = supervisor_of(dataclasses.replace(spec, grace_s=JobSpec.grace_s))
        stopper = threading.Thread(target=_stop_in_training, args=(root, supervisor))
        stopper.start()
        result = supervisor.run(TIMEOUT_S)
        stopper.join()
        lives = Lives(root, 1)
        (at,) = set(lives.values(0, "left_at"))
        assert at is not None
        assert lives.steps(0, "persistent.complete") == [{at}] * COUNT
        assert "killed" not in str(result.error)


def _stop_in_training(root: Path, supervisor: Supervisor) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S / 2
    while None in Lives(root, 1).values(0, "right") and time.monotonic() < give_up_s:
        time.sleep(0.1)
    supervisor.stop(signal.SIGTERM)


CASES: dict[str, list[dict[str, Any]]] = {
    "in_the_middle_of_a_save": [
        {"life": 0, "process": 2, "event": "save.stage.copied", "step": 40, "signal": "TERM"}
    ],
    "two_notices": [
        {"life": 0, "process": process, "event": "save.started", "step": 40, "signal": "TERM"}
        for process in (1, 3)
    ],
    "a_notice_again_while_leaving": [
        {"life": 0, "process": 1, "event": "save.started", "step": 40, "signal": "TERM"},
        {"life": 0, "process": 1, "event": "preemption.reached", "signal": "TERM"},
    ],
}


@pytest.mark.parametrize(
    "case",
    [
        "in_the_middle_of_a_save",
        pytest.param("two_notices", marks=pytest.mark.slow),
        pytest.param("a_notice_again_while_leaving", marks=pytest.mark.slow),
    ],
)
def test_notices_at_awkward_moments(case: str) -> None:
    with job_root() as root:
        lives = run(root, LAST, hooks=CASES[case], pace_s=PACE_S)
        (at,) = lives.steps(0, "preemption.reached")[0]
        assert lives.values(0, "left_at") == [at] * COUNT
        assert at >= 40
        lives.check_resumed(1, at)


@pytest.mark.slow
def test_notice_without_jax_service_is_acted_on_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    with job_root() as root:
        lives = run(root, LAST, hooks=CASES["in_the_middle_of_a_save"], pace_s=PACE_S)
        (at,) = lives.steps(0, "preemption.reached")[0]
        assert lives.steps(0, "preemption.reached") == [{at}] * COUNT
        assert lives.values(0, "left_at") == [at] * COUNT
        lives.check_resumed(1, at)


def test_notice_while_restoring_is_acted_upon_at_the_first_step() -> None:
    with job_root() as root:
        hooks = [
            {
                "life": 1,
                "process": 2,
                "event": "restore.stage.planned",
                "signal": "TERM",
                "sleep_s": 2.5,
            }
        ]
        # Each save is over when ``save`` returns: nothing else holds this training back.
        lives = run(root, 60, "step=45 kill=all exact", hooks=hooks, async_save=False)
        lives.check_resumed(1, 40)
        (at,) = set(lives.values(1, "left_at"))
        assert at in (41, 42)
        lives.check_resumed(2, at)


@pytest.mark.slow
def test_kill_before_the_end_costs_no_whole_step() -> None:
    with job_root() as root:
        hooks = [
            {"life": 0, "process": 1, "event": "save.complete", "step": 40, "signal": "TERM"},
            {"life": 0, "process": 3, "event": "preemption.reached", "signal": "KILL"},
        ]
        lives = run(root, LAST, hooks=hooks, pace_s=PACE_S)
        complete = set().union(*lives.steps(0, "save.complete"))
        (restored,) = set(lives.values(1, "restored"))
        assert restored >= max(complete) >= 40
        lives.check_resumed(1, restored)


def test_when_time_is_short_ram_comes_first_and_rest_is_named() -> None:
    with job_root() as root:
        hooks = [
            {"life": 0, "process": 1, "event": "save.started", "step": 40, "signal": "TERM"},
            {"life": 0, "process": 0, "event": "persistent.stage.started", "sleep_s": 20.0},
        ]
        lives = run(
            root,
            LAST,
            hooks=hooks,
            pace_s=PACE_S,
            dir=str(root / "persistent"),
            preemption_grace_s=8.0,
            on_preemption="exit",
        )
        (at,) = lives.steps(0, "preemption.reached")[0]
        assert all(at in steps for steps in lives.steps(0, "save.complete"))
        assert lives.steps(0, "preemption.missed.not_written")[0] == {at}
        lives.check_resumed(1, at)


def test_notices_by_several_ways_are_one_save_of_all() -> None:
    """Life 0: a file before the first save, and SIGTERM elsewhere while a save is under way.

    Life 1: the file is still there; a request comes during the restore. Life 2 ends undisturbed.
    """
    with job_root() as root:
        flag = root / "flag"
        hooks: list[dict[str, Any]] = [
            {"life": 0, "process": 1, "event": "start.ready", "touch": str(flag)},
            {"life": 0, "process": 3, "event": "save.started", "signal": "TERM"},
            {"life": 1, "process": 2, "event": "restore.stage.started", "request": True},
        ]
        lives = run(
            root,
            LAST,
            hooks=hooks,
            pace_s=PACE_S,
            observers=[f"notices(file:{flag})"],
            local_save_every=5,
        )
        assert len(lives.seen) == 3
        before = 0
        for life in (0, 1):
            (at,) = lives.steps(life, "preemption.reached")[0]
            assert lives.steps(life, "preemption.reached") == [{at}] * COUNT
            assert lives.values(life, "left_at") == [at] * COUNT
            assert before < at < LAST
            lives.check_resumed(life + 1, at)
            before = at
        assert lives.steps(2, "preemption.reached") == [set()] * COUNT
