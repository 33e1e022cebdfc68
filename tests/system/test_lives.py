"""Restarts of real jobs: slices killed in training, other numbers and shapes, no trainers."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from looks import eckpt
from restarts import new_world, train_and_kill
from running_jobs import ByProgram, job_root, renumbered, run_life, spec_of

from emergency_ckpt.run_secret import SECRET_VARIABLE

pytestmark = pytest.mark.timeout(900)

ALL = 1386  # bytes that each process of the four holds
REPLICATED = 138  # of these, what every process of a slice holds alike
STEP = 10  # all have reached step 12
SECRET = {SECRET_VARIABLE: secrets.token_hex(32)}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with job_root() as path:
        yield path


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """Two slices of two hosts train; slice 1 is killed; the ramdisks stay as they are then."""
    spec = spec_of(root, "lives_job.py", "train")
    train_and_kill(dataclasses.replace(spec, env=SECRET), victims=(2, 3))
    return root


@pytest.fixture(scope="module")
def permuted(trained: Path) -> ByProgram:
    """A life in which every host has another number, and belongs to the other slice."""
    lost = {
        "everything_kept": (),
        "a_host_lost": (1,),
        "a_slice_lost": (2, 3),
        "both_slices_half_lost": (0, 3),
    }
    programs = (*lost, "after_drain", "primary_is_another_slice")
    spec = spec_of(trained, "lives_job.py", *programs)
    spec = dataclasses.replace(spec, env=SECRET)
    for name, hosts in lost.items():
        new_world(spec, name, range(4), hosts)
    drain(trained / "drained", [spec.ramdisk(host) / "base" for host in (2, 3)])
    order = renumbered([3, 2, 1, 0])
    return ByProgram(run_life(spec, trained, life=1, host_of_process=order))


@pytest.fixture(scope="module")
def smaller(trained: Path) -> ByProgram:
    """A life of one slice of two hosts."""
    names = ("without_host_state", "with_host_state")
    spec = spec_of(trained, "lives_job.py", *names, slices=1)
    for name in names:
        new_world(spec, name, (0, 1))
    spec = dataclasses.replace(spec, env=SECRET)
    return ByProgram(run_life(spec, trained, life=2))


def drain(directory: Path, ramdisks: list[Path]) -> None:
    """``eckpt drain`` of some hosts' ramdisks."""
    places = [word for ramdisk in ramdisks for word in ("--local-dir", ramdisk)]
    done = eckpt("drain", "--dir", directory, *places, env=SECRET)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"drained step {STEP} ")


def check(seen: list[dict[str, Any]], owners: tuple[int, ...]) -> None:
    """Each process has step 10, bit for bit, and goes on where ``owners`` were then."""
    assert [(s.get("step"), s.get("tier")) for s in seen] == [(STEP, "local")] * len(seen), seen
    assert [s["differences"] for s in seen] == [[]] * len(seen)
    assert [s["iterator"] for s in seen] == [[owner, 100 * STEP + owner] for owner in owners]


def test_slice_killed_in_training_comes_back_without_its_ram(permuted: ByProgram) -> None:
    seen = permuted["a_slice_lost"]
    check(seen, (0, 1, 2, 3))
    # Processes 0 and 1 run on the hosts 3 and 2, which came back empty.
    assert [(s["local"], s["peer"]) for s in seen[:2]] == [(0, ALL)] * 2
    assert all(s["local"] > 0 for s in seen[2:])


@pytest.mark.parametrize("program", ["everything_kept", "a_host_lost", "both_slices_half_lost"])
def test_hosts_with_other_numbers(permuted: ByProgram, program: str) -> None:
    """Iterators follow the process index, wherever their documents are."""
    seen = permuted[program]
    check(seen, (0, 1, 2, 3))
    assert [s["local"] + s["peer"] for s in seen] == [ALL] * 4
    empty = {"everything_kept": (), "a_host_lost": (2,), "both_slices_half_lost": (0, 3)}[program]
    kept = [0 if process in empty else REPLICATED for process in range(4)]
    assert [s["local"] for s in seen] == kept, "each host has the part of another process"


def test_drained_step_is_restored_by_a_job_without_ram(permuted: ByProgram) -> None:
    seen = permuted["after_drain"]
    assert [(s.get("step"), s.get("tier")) for s in seen] == [(STEP, "persistent")] * 4, seen
    assert [s["differences"] for s in seen] == [[]] * 4
    assert [s["iterator"] for s in seen] == [[owner, 100 * STEP + owner] for owner in range(4)]


def test_fewer_slices_without_host_state(smaller: ByProgram) -> None:
    seen = smaller["without_host_state"]
    assert [(s["step"], s["differences"]) for s in seen] == [(STEP, [])] * 2
    assert [s["iterator"] for s in seen] == [[-1, 0]] * 2


def test_fewer_slices_need_a_remap_of_host_states(smaller: ByProgram) -> None:
    for refused, _ in smaller["with_host_state"]:
        assert refused["error"] == "HostStateError"
        assert "host_state_remap" in refused["text"]
        assert refused["untouched"]
    check([then for _, then in smaller["with_host_state"]], (0, 2))


def test_mesh_may_begin_with_the_other_slice(permuted: ByProgram) -> None:
    """Two processes write: also numbers, numpy values, and arrays that each made for itself."""
    wanted = {
        "step": 5,
        "tier": "persistent",
        "differences": [],
        "own": {"counter": 7, "scale": [0.0, 1.0, 2.0]},
        "iterator_right": True,
    }
    assert permuted["primary_is_another_slice"] == [wanted] * 4
