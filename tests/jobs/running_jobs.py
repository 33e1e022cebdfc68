"""Starts the programs of this directory as real multi-process jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emergency_ckpt.tools.launch.job import JobSpec, ProcessExit
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet
from examples.faults.job_layout import JobLayout

HERE = Path(__file__).parent
LIFE_TIMEOUT_S = 600.0
PROGRAM_TIMEOUT_S = 300.0
PASSED_VARIABLE = "ECKPT_TEST_PASSED"
"""Names the programs of a job that an earlier start has run, as JSON."""
_AFTERMATH_S = 10.0
_MOST_STARTS = 5
_LIVES_APART = 100


@contextlib.contextmanager
def job_root() -> Iterator[Path]:
    """A directory on tmpfs for ramdisks, results and logs; kept, and named, when a test fails."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir=base))
    try:
        yield root
    except BaseException:
        print(f"logs are kept in {root}")
        raise
    else:
        shutil.rmtree(root)


def spec_of(
    root: Path, program: str, *arguments: str, slices: int = 2, hosts: int = 2, devices: int = 1
) -> JobSpec:
    """A job that runs ``program`` of this directory."""
    command = (sys.executable, str(HERE / program), str(root), str(slices), *arguments)
    return JobSpec(
        command=command,
        slices=slices,
        hosts_per_slice=hosts,
        devices_per_host=devices,
        local_root=root / "hosts",
        log_dir=root / "logs",
        grace_s=0.2,
    )


def renumbered(order: Sequence[int]) -> tuple[int, ...]:
    """Return the layout of a job of two slices of two hosts whose processes have other numbers."""
    return JobLayout.first(2, 2).renumbered(order).host_of_process


def run_life(
    spec: JobSpec,
    root: Path,
    *,
    life: int = 0,
    host_of_process: Sequence[int] | None = None,
    program_timeout_s: float = PROGRAM_TIMEOUT_S,
) -> list[dict[str, Any]]:
    """Run one life of a job; return the outcome of each of its programs, by process.

    ``program_timeout_s``: the most that one program may take.

    Programs of one job need nothing of each other. Where a process dies in one of them, or does
    not come out of it, that program has an error for its outcome, and the job is started again
    for those after it.

    Raises:
      AssertionError: no program began.
    """
    outcomes: list[dict[str, Any]] = [{} for _ in range(spec.slices * spec.hosts_per_slice)]
    for start in range(_MOST_STARTS):
        number = life + _LIVES_APART * start
        env = {**spec.env, PASSED_VARIABLE: json.dumps(list(outcomes[0]))}
        bad = _run(
            dataclasses.replace(spec, env=env), root, number, host_of_process, program_timeout_s
        )
        seen = [_results(root, number, process) for process in range(len(outcomes))]
        names = list(max(seen, key=len))
        begun = [name for name in names if any(each.get(name) for each in seen)]
        assert begun or not (bad or names), f"no program began: {bad}"
        for mine, each in zip(outcomes, seen, strict=True):
            mine.update({name: each.get(name) or {"error": "did not begin"} for name in begun})
        for process, reason in bad.items():
            outcomes[process][begun[-1]] = {"error": reason}
        if not bad or begun == names:
            return outcomes
    for mine in outcomes:
        rest = {"error": f"did not run: the job crashed {_MOST_STARTS} times"}
        mine.update({name: rest for name in names if name not in mine})
    return outcomes


def results_path(root: Path, life: int, process: int) -> Path:
    """The outcomes of ``process``: None for a program that has not begun."""
    return root / f"results_{life}_{process}.json"


def _results(root: Path, life: int, process: int) -> dict[str, Any]:
    path = results_path(root, life, process)
    return json.loads(path.read_text()) if path.exists() else {}


def _run(
    spec: JobSpec,
    root: Path,
    life: int,
    host_of_process: Sequence[int] | None,
    program_timeout_s: float,
) -> dict[int, str]:
    """Run a job to its end, or to the first bad end of a process; return what went wrong."""
    paths = [results_path(root, life, p) for p in range(spec.slices * spec.hosts_per_slice)]
    with ProcessSet(spec, host_of_process, restart_count=life) as processes:
        written, deadline_s = None, 0.0
        while processes.running and not _bad(processes):
            now = [path.stat().st_mtime_ns for path in paths if path.exists()]
            if now != written:
                written, deadline_s = now, time.monotonic() + program_timeout_s
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
            processes.poll()
        if _bad(processes):
            # What the others say of it is in the logs.
            deadline_s = time.monotonic() + _AFTERMATH_S
            while processes.running and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                processes.poll()
        bad = {end.process: str(end) for end in _bad(processes)}
        bad.update(dict.fromkeys(processes.running, "did not end"))
        processes.end(grace_s=0)
    return {
        process: f"{reason}\n{spec.log_path(life, process).read_text()[-3000:]}"
        for process, reason in bad.items()
    }


def _bad(processes: ProcessSet) -> list[ProcessExit]:
    return [end for end in processes.exits if end.returncode != 0]


def of(results: list[dict[str, Any]], program: str) -> list[Any]:
    """What ``program`` returned on each process."""
    outcomes = [result[program] for result in results]
    assert all("value" in outcome for outcome in outcomes), outcomes
    return [outcome["value"] for outcome in outcomes]


class ByProgram(Mapping[str, list[Any]]):
    """Values of a job, by program: a program that failed fails who reads it, and nobody else."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        self.results = results

    def __getitem__(self, program: str) -> list[Any]:
        return of(self.results, program)

    def __iter__(self) -> Iterator[str]:
        return iter(self.results[0])

    def __len__(self) -> int:
        return len(self.results[0])


def check_whole(seen: list[dict[str, Any]], step: int, tier: str = "local") -> None:
    """All four processes have ``step`` back from ``tier``, every bit and the iterator's place."""
    assert [(s.get("step"), s.get("tier")) for s in seen] == [(step, tier)] * 4, seen
    assert [s["differences"] for s in seen] == [[]] * 4
    assert [s["iterator_right"] for s in seen] == [True] * 4


def moved(seen: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Bytes of each process from its own RAM and from peers."""
    return [(s["local"], s["peer"]) for s in seen]
