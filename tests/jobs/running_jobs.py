"""Starts the programs of this directory as real multi-process jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emergency_ckpt.launch.job import JobSpec
from emergency_ckpt.launch.job_layout import JobLayout
from emergency_ckpt.launch.process_set import ProcessSet

HERE = Path(__file__).parent
LIFE_TIMEOUT_S = 600.0


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


def run_life(
    spec: JobSpec, root: Path, *, life: int = 0, topology: JobLayout | None = None
) -> list[dict[str, Any]]:
    """One life of a job that is to end well; the results of its processes."""
    with ProcessSet(spec, topology, restart_count=life) as processes:
        exits = processes.wait(LIFE_TIMEOUT_S)
    bad = [str(end) for end in exits if end.returncode != 0]
    assert not bad, f"{bad}; logs: {_tails(spec, life)}"
    count = spec.slices * spec.hosts_per_slice
    return [json.loads((root / f"results_{life}_{p}.json").read_text()) for p in range(count)]


def _tails(spec: JobSpec, life: int) -> str:
    count = spec.slices * spec.hosts_per_slice
    return "\n".join(
        f"--- process {p}\n{spec.log_path(life, p).read_text()[-3000:]}" for p in range(count)
    )


def of(results: list[dict[str, Any]], program: str) -> list[Any]:
    """What ``program`` returned on each process."""
    outcomes = [result[program] for result in results]
    assert all("value" in outcome for outcome in outcomes), outcomes
    return [outcome["value"] for outcome in outcomes]


def check_whole(seen: list[dict[str, Any]], step: int, tier: str = "local") -> None:
    """All four processes have ``step`` back from ``tier``, every bit and the iterator's place."""
    assert [(s.get("step"), s.get("tier")) for s in seen] == [(step, tier)] * 4, seen
    assert [s["differences"] for s in seen] == [[]] * 4
    assert [s["iterator_right"] for s in seen] == [True] * 4


def moved(seen: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Bytes of each process from its own RAM and from peers."""
    return [(s["local"], s["peer"]) for s in seen]
