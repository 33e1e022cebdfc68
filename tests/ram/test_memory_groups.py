"""What the system says: mounts, and memory limits, held against what a start reserves."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tiers_support import LAYOUT, complete_save, make_old, open_tier

from emergency_ckpt.core.limits import MAX_GROUP_FILE_BYTES, SMALL_FILES_BYTES
from emergency_ckpt.errors import MemoryLimitReached
from emergency_ckpt.ram import host_memory
from emergency_ckpt.ram.host_memory import MemoryLimit, file_system_of, memory_limits

STAT = (
    "anon 4000\ninactive_file 300\nactive_file 40\ntotal_inactive_file 700\ntotal_active_file 50\n"
)


def _group(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _limits(root: Path, groups: str) -> list[MemoryLimit]:
    (root / "groups").write_text(groups)
    return memory_limits(root, root / "groups")


def test_groups_v2_all_above_count(tmp_path: Path) -> None:
    used = {"memory.current": "4500\n", "memory.stat": STAT}
    _group(tmp_path / "pod/container", {"memory.max": "max\n", **used})
    pod = _group(tmp_path / "pod", {"memory.max": "5000\n", **used})
    (found,) = _limits(tmp_path, "0::/pod/container\n")
    assert found == MemoryLimit(f"cgroup {pod}", 5000, 4500, 340)
    assert found.left_bytes == 840


def test_groups_v1_beside_v2_count_all_inner_ones(tmp_path: Path) -> None:
    used = {"memory.usage_in_bytes": "4500\n", "memory.stat": STAT}
    job = _group(tmp_path / "memory/job", {"memory.limit_in_bytes": "6000\n", **used})
    step = _group(job / "step", {"memory.limit_in_bytes": "9223372036854771712\n", **used})
    found = _limits(tmp_path, "8:pids:/job/step\n4:memory,hugetlb:/job/step\n0::/\n")
    assert [(each.name, each.left_bytes) for each in found] == [
        (f"cgroup {step}", 9223372036854771712 - 3750),
        (f"cgroup {job}", 2250),
    ]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max"},
        {"memory.max": "5000"},
        {"memory.max": "5000", "memory.current": ""},
        {"memory.max": "-1", "memory.current": "3"},
        {"memory.max": "9" * 21, "memory.current": "3"},
        {"memory.max": "5000" + " " * MAX_GROUP_FILE_BYTES + "max", "memory.current": "x"},
    ],
)
def test_group_file_missing_or_strange_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    _group(tmp_path / "job", files)
    assert _limits(tmp_path, "0::/job\n") == []


def test_groups_file_missing_is_no_limit(tmp_path: Path) -> None:
    assert memory_limits(tmp_path, tmp_path / "absent") == []
    assert _limits(tmp_path, "no group\n0\n\n0::/../..\n4:memory:/gone\n") == []


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the limit file of a job that is allowed 64 MiB and has taken 24 of them."""
    used = {"memory.current": str(24 << 20), "memory.stat": ""}
    job = _group(tmp_path / "groups/job", {"memory.max": str(64 << 20), **used})
    (tmp_path / "self").write_text("0::/job\n")
    found = partial(memory_limits, tmp_path / "groups", tmp_path / "self")
    monkeypatch.setattr(host_memory, "memory_limits", found)
    return job / "memory.max"


def test_reserve_beyond_memory_limit_is_refused(limit: Path, ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    with pytest.raises(MemoryLimitReached, match="are left for") as caught:
        tier.reserve(20 << 20)
    assert str(limit.parent) in str(caught.value)
    assert "--mem" in str(caught.value)
    assert not list(tier.path.glob("slot_*"))
    tier.reserve(19 << 20)
    assert len(list(tier.path.glob("slot_*"))) == 2
    tier.close()


def test_reserve_counts_processes_without_slots(limit: Path, ramdisk: Path) -> None:
    """All tasks of a node reserve at the same time, in one limit."""
    del limit
    first, second = open_tier(ramdisk), open_tier(ramdisk, process_index=1)
    with pytest.raises(MemoryLimitReached):
        first.reserve(15 << 20)
    second.reserve(4 << 20)
    first.reserve(15 << 20)
    for tier in (first, second):
        tier.close()


def test_reserve_memory_limit_removes_no_run(limit: Path, ramdisk: Path) -> None:
    """Pages of another run count in another job: this one gains nothing."""
    del limit
    old = open_tier(ramdisk, run_id="crashed")
    old.reserve(1 << 16)
    old.close()
    make_old(old.path, 10 * 86400.0)
    tier = open_tier(ramdisk)
    with pytest.raises(MemoryLimitReached):
        tier.reserve(40 << 20)
    assert old.path.is_dir()
    tier.close()


def test_reserve_again_takes_pages_of_dead_life(limit: Path, ramdisk: Path) -> None:
    """Its slots are reused: nothing is left below the limit, and nothing is needed."""
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    digest = complete_save(tier, 1)
    tier.close()
    limit.write_text(str((24 << 20) + SMALL_FILES_BYTES // 2))
    again = open_tier(ramdisk)
    again.reserve(LAYOUT.size_bytes)
    assert {each.digest for each in again.held()[0]} == {digest}
    with pytest.raises(MemoryLimitReached):
        again.reserve(SMALL_FILES_BYTES)
    again.close()


def test_file_system_of_takes_the_innermost_and_newest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "torn line\n"
        "2 1 0:5 / /with\\040space rw shared:2 - tmpfs tmpfs rw\n"
        "3 2 0:6 / /with\\040space/in rw - xfs /dev/sdb rw\n"
        "4 2 0:7 / /with\\040space/in rw - tmpfs tmpfs rw\n"
    )
    found = [
        file_system_of(path, mounts)
        for path in ("/", "/with", "/with space/x", "/with space/in/x", "/with space/into")
    ]
    assert found == ["ext4", "ext4", "tmpfs", "tmpfs", "tmpfs"]
    assert file_system_of("/", tmp_path / "absent") is None
