"""A connection that breaks, or a peer that says nothing for a while, costs no step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts import mount_tmpfs, unmount
from running_jobs import check_whole, job_root, of, run_life, spec_of

PROGRAMS = ("resets", "silence", "refusal", "loaded")
RAMDISK_BYTES = 11 << 19  # two slots of 2 MiB, and small files


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root, contextlib.ExitStack() as mounts:
        programs = (*PROGRAMS, "small_ramdisk") if mount_all(root, mounts) else PROGRAMS
        yield run_life(spec_of(root, "unsteady_job.py", *programs), root)


def mount_all(root: Path, mounts: contextlib.ExitStack) -> bool:
    """A small ramdisk of its own for each process, where this may be mounted."""
    for host in range(4):
        path = root / "small" / f"host_{host}"
        path.mkdir(parents=True)
        if not mount_tmpfs(path, RAMDISK_BYTES):
            return False
        mounts.callback(unmount, path)
    return True


@pytest.mark.parametrize("program", ["resets", "silence"])
def test_restore_over_unsteady_connections_has_the_newest_step(
    results: list[dict[str, Any]], program: str
) -> None:
    seen = of(results, program)
    check_whole(seen, 10)
    assert [s["quarantined"] for s in seen] == [[]] * 4
    assert [s["rejected"] for s in seen] == [[]] * 4


def test_restore_without_its_holder_fails_and_loses_nothing(
    results: list[dict[str, Any]],
) -> None:
    refused, again = zip(*of(results, "refusal"), strict=True)
    for seen in refused:
        assert seen.get("error") == "HolderUnreachable", seen
        assert "process/0" in seen["text"] or "process/1" in seen["text"]
        assert "restore again" in seen["text"]
        assert "heartbeat_timeout_seconds" in seen["text"]
    check_whole(list(again), 10)


def test_load_over_unsteady_connections_is_done_once(results: list[dict[str, Any]]) -> None:
    seen = of(results, "loaded")
    check_whole(seen, 10, "persistent")
    assert [s["loads"] for s in seen] == [[10]] * 4


def test_load_into_a_ramdisk_of_two_slots_leaves_room_to_save(
    results: list[dict[str, Any]],
) -> None:
    if "small_ramdisk" not in results[0]:
        pytest.skip("mounting a tmpfs needs privileges")
    seen = of(results, "small_ramdisk")
    assert seen == [{"step": 10, "same": True, "loads": 1}] * 4
