"""Notices at moments at which the training loop does not come to save: real processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_jobs import PROGRAM_TIMEOUT_S, job_root, spec_of

from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

AT = 20
Lines = list[dict[str, Any]]


def seen(root: Path, life: int, process: int) -> Lines:
    path = root / f"seen_{life}_{process}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(lines: Lines, event: str) -> list[int]:
    return [line["step"] for line in lines if line.get("event") == event]


def live(
    root: Path,
    moment: str,
    *,
    life: int = 0,
    hosts: int = 1,
    is_over: Callable[[list[Lines]], bool] = lambda _: False,
    **settings: Any,
) -> tuple[list[Lines], dict[int, int | None], list[str]]:
    """Run one life to its end, or until ``is_over``; then all are killed, as at a grace's end.

    Returns what the processes wrote down, their exit statuses, and their logs.
    """
    spec = spec_of(root, "bad_moments_job.py", moment, json.dumps(settings), hosts=hosts)
    count, deadline_s = 2 * hosts, time.monotonic() + PROGRAM_TIMEOUT_S
    with ProcessSet(spec, restart_count=life) as processes:
        while processes.running and not is_over([seen(root, life, p) for p in range(count)]):
            assert time.monotonic() < deadline_s, [seen(root, life, p)[-3:] for p in range(count)]
            processes.poll()
            time.sleep(POLL_S)
        ends = {end.process: end.returncode for end in processes.exits}
        processes.end(grace_s=0)
    logs = [spec.log_path(life, process).read_text() for process in range(count)]
    return [seen(root, life, process) for process in range(count)], ends, logs


def restored(root: Path) -> list[Any]:
    """What each process of a next life has back from storage alone: the step, whole or not."""
    shutil.rmtree(root / "hosts")
    lines, _, _ = live(root, "none", life=1, last=AT + 1)
    return [(each[0]["restored"], each[0]["right"]) for each in lines]


def has_missed(lines: Lines) -> bool:
    return any(line.get("event") == "preemption.missed.no_save" for line in lines)


def test_long_evaluation_brings_the_step_of_ram_to_storage() -> None:
    """No call of ``save`` comes before the kill."""
    with job_root() as root:
        lines, _, logs = live(
            root,
            "evaluation",
            is_over=lambda seen_by: all(map(has_missed, seen_by)),
            pause_s=600.0,
            preemption_grace_s=8.0,
        )
        assert [steps(each, "persistent.complete") for each in lines] == [[AT]] * 2
        assert [steps(each, "preemption.reached") for each in lines] == [[]] * 2
        text = f"The newest in RAM is step {AT}, in storage step {AT}."
        assert all("ERROR:absl:a preemption notice came" in log and text in log for log in logs)
        assert restored(root) == [(AT, True)] * 2


def test_loop_that_comes_after_the_grace_saves_all_the_same() -> None:
    with job_root() as root:
        lines, ends, _ = live(root, "evaluation", pause_s=12.0, preemption_grace_s=6.0)
        assert ends == dict.fromkeys(range(2), PREEMPTED_EXIT_CODE)
        assert [steps(each, "preemption.reached") for each in lines] == [[AT + 1]] * 2
        assert [steps(each, "persistent.complete")[-1] for each in lines] == [AT + 1] * 2
        assert [steps(each, "preemption.missed.not_written") for each in lines] == [[]] * 2
        assert restored(root) == [(AT + 1, True)] * 2


def test_rank_that_is_gone_lets_the_others_say_what_is_lost() -> None:
    """Storage takes no step without its host state, and nobody waits for it."""
    with job_root() as root:
        lines, _, logs = live(
            root,
            "rank gone",
            hosts=2,
            is_over=lambda seen_by: all(has_missed(seen_by[process]) for process in (0, 2, 3)),
            pause_s=600.0,
            preemption_grace_s=8.0,
        )
        assert [steps(each, "persistent.complete") for each in lines] == [[]] * 4
        assert all("ERROR:absl:a preemption notice came" in logs[process] for process in (0, 2, 3))


@pytest.mark.slow
def test_notice_while_the_first_step_compiles_saves_it() -> None:
    with job_root() as root:
        lines, ends, _ = live(root, "compile", pause_s=4.0)
        assert ends == dict.fromkeys(range(2), PREEMPTED_EXIT_CODE)
        assert [steps(each, "persistent.complete") for each in lines] == [[1]] * 2
        assert restored(root) == [(1, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the start", "in the start", "twice"])
def test_notice_around_the_start_or_once_more_costs_no_step(moment: str) -> None:
    with job_root() as root:
        lines, ends, _ = live(root, moment)
        assert ends == dict.fromkeys(range(2), PREEMPTED_EXIT_CODE)
        (at,) = steps(lines[0], "preemption.reached")
        assert [steps(each, "persistent.complete") for each in lines] == [[at]] * 2
        assert restored(root) == [(at, True)] * 2
