"""A loop of plain Orbax as a job of real processes, with nothing but its import changed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_support import JobSpec
from ledgers import complete_in
from places import JOBS
from readme_blocks import readme_block
from restarts import train_and_kill
from running_jobs import job_root, of, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

PROGRAM = JOBS / "plain_orbax_loop.py"
KILLED_AT, IN_RAM = 15, 10  # storage has the first step, which every manager of Orbax saves


def job(root: Path, text: str) -> JobSpec:
    spec = spec_of(root, "text_program.py", hosts=1)
    executable, program, *arguments = spec.command
    return dataclasses.replace(spec, command=(executable, program, text, *arguments))


def kill_when_saved(spec: JobSpec, victims: tuple[int, ...]) -> None:
    """Kill the victims once a step is whole in RAM, and end the others."""
    train_and_kill(
        spec,
        victims,
        KILLED_AT,
        lambda: all(newest_in_ram(spec, host) >= IN_RAM for host in range(2)),
    )


def newest_in_ram(spec: JobSpec, host: int) -> int:
    """The newest step that the process on this host knew to be whole."""
    return complete_in(spec.ramdisk(host))


@pytest.fixture(scope="module")
def changed() -> Iterator[tuple[Path, JobSpec]]:
    with job_root() as root:
        theirs, ours = (line[1:] + "\n" for line in readme_block("plain", "diff").splitlines())
        source = PROGRAM.read_text()
        assert source.count(theirs) == 1
        yield root, job(root, source.replace(theirs, ours))


def test_plain_loop_with_our_import_restores_from_ram(changed: tuple[Path, JobSpec]) -> None:
    root, spec = changed
    kill_when_saved(spec, victims=(1,))
    shutil.rmtree(spec.ramdisk(1))  # the second host is gone with its RAM
    seen: list[Any] = of(run_life(spec, root, life=1), "loop")
    assert [(each["first"], each["found"]) for each in seen] == [(IN_RAM, IN_RAM)] * 2
    assert [each["whole"] for each in seen] == [True, True]


def test_v1_loop_restores_a_lost_slice_from_ram() -> None:
    with job_root() as root:
        spec = spec_of(root, "orbax_v1_loop.py", hosts=1)
        kill_when_saved(spec, victims=(1,))
        shutil.rmtree(spec.ramdisk(1))
        seen: list[Any] = of(run_life(spec, root, life=1), "loop")
    assert [(each["first"], each["found"]) for each in seen] == [(IN_RAM, IN_RAM)] * 2
    assert [each["whole"] for each in seen] == [True, True]
    # The save of step 20 to storage, and the newest in RAM.
    assert [each["steps"] for each in seen] == [[20]] * 2
