"""A ramdisk that runs full: a clear error before anything is lost, never a SIGBUS.

On a tmpfs of 8 MiB of its own where this process may mount one; else on the ramdisk of the machine,
with sizes to match, where what needs the last byte to be taken is left out.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounts import make_read_only, mount_tmpfs, unmount
from tiers_support import (
    LAYOUT,
    RUN_ID,
    W_SHARD,
    assert_whole,
    close_tiers,
    complete_save,
    document,
    held_steps,
    make_old,
    open_tier,
    pinned_save,
    save_id,
    shard_bytes,
    write_save,
)

from emergency_ckpt.errors import LocalTierError, MemoryLimitReached, RamdiskFull
from emergency_ckpt.files import local_error
from emergency_ckpt.ram import leftovers


@dataclasses.dataclass(frozen=True)
class Ramdisk:
    path: Path
    mounted: bool

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self) -> None:
        """Take all space that is left."""
        if self.mounted:
            fd = os.open(self.path / "filler", os.O_RDWR | os.O_CREAT)
            while self.free_bytes:
                os.posix_fallocate(fd, os.fstat(fd).st_size, self.free_bytes)
            os.close(fd)


@pytest.fixture
def small() -> Iterator[Ramdisk]:
    path = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    mounted = mount_tmpfs(path, 8 << 20)
    yield Ramdisk(path, mounted)
    close_tiers()
    if mounted:
        unmount(path)
    shutil.rmtree(path)


def test_slots_that_do_not_fit_are_refused_and_take_nothing(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    before = small.free_bytes
    with pytest.raises(RamdiskFull) as caught:
        tier.reserve(before // 4 * 3)
    assert caught.value.expected is not None
    assert caught.value.actual is not None
    assert not list(tier.path.glob("slot_*"))
    if small.mounted:
        assert small.free_bytes == before
        assert str(before) in str(caught.value)
    digest = write_save(tier, 1)
    assert_whole(tier, digest, 1)


def test_ramdisk_without_a_limit_has_room(small: Ramdisk) -> None:
    if not small.mounted:
        pytest.skip("this process may mount no ramdisk")
    (unlimited := small.path / "unlimited").mkdir()
    assert mount_tmpfs(unlimited, 0)
    try:
        tier = open_tier(unlimited / "runs")
        tier.reserve(16 << 20)
        assert_whole(tier, complete_save(tier, 1), 1)
        tier.close()
    finally:
        unmount(unlimited)


def test_processes_of_one_start_share_a_full_ramdisk(
    small: Ramdisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that they are of one start has no room; a restore needs none."""
    if not small.mounted:
        pytest.skip("the ramdisk of the machine cannot be filled")
    monkeypatch.setattr(leftovers, "SETTLE_S", 0.2)
    small.fill()
    tiers = [open_tier(small.path, process_index=index, start="one") for index in range(2)]
    assert [tier.path.name for tier in tiers] == ["process_00000", "process_00001"]
    for tier in tiers:
        tier.adopt_orphans()
    os.truncate(small.path / "filler", 0)
    complete_save(tiers[0], 1)
    with pytest.raises(LocalTierError, match=r"a process without a record holds .* step 1"):
        open_tier(small.path, process_index=2, start="another")


def test_growing_beyond_the_room_keeps_what_is_published(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    tier.reserve(LAYOUT.size_bytes)
    complete_save(tier, 1)
    digest = complete_save(tier, 2)
    with pytest.raises(RamdiskFull):
        tier.reserve(small.free_bytes)
    with pytest.raises(RamdiskFull):
        tier.begin_write(save_id(3), small.free_bytes * 2)
    assert held_steps(tier) == [1, 2]
    sizes = {path.stat().st_size for path in tier.path.glob("slot_?.bin")}
    assert sizes == {12288}
    assert_whole(tier, digest, 2)


def test_saves_go_on_in_reserved_slots_when_the_ramdisk_is_full(small: Ramdisk) -> None:
    """The slots were reserved: only the small files can fail, and they say so."""
    tier = open_tier(small.path)
    tier.reserve(LAYOUT.size_bytes)
    digest = complete_save(tier, 1)
    complete_save(tier, 2)
    small.fill()
    with tier.begin_write(save_id(3), LAYOUT.size_bytes) as writer:
        crcs = writer.copy([(shard_bytes(3)[W_SHARD], LAYOUT.shards[W_SHARD].offset)])
        assert len(crcs) == 1
    assert held_steps(tier) == [2]
    del digest
    if small.mounted:
        # The place of the manifest that begin_write removed was taken too.
        os.truncate(small.path / "filler", os.stat(small.path / "filler").st_size - 4096)
        small.fill()
        with pytest.raises(RamdiskFull, match="no space left"):
            write_save(tier, 3)
        with pytest.raises(RamdiskFull, match="no space left"):
            tier.publish_host_state(save_id(3), 0, 4, document(3))
        with pytest.raises(RamdiskFull, match="no space left"):
            tier.note_complete(save_id(3))
        assert not list(small.path.rglob(".tmp-*"))
        assert tier.held()[2] == save_id(2)
        (small.path / "filler").unlink()
    newest = complete_save(tier, 4)
    assert_whole(tier, newest, 4)


def test_slot_more_that_does_not_fit_fails_the_save_only(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    size = small.free_bytes // 5 * 2
    if not small.mounted:
        size = LAYOUT.size_bytes
    tier.reserve(size)
    digest = complete_save(tier, 1)
    tier.plan_saves(0, writes_storage=True)
    with tier.reading(digest):
        complete_save(tier, 2)
        if small.mounted:
            with pytest.raises(RamdiskFull):
                tier.begin_write(save_id(3), size)
    complete_save(tier, 3)
    assert held_steps(tier) == [2, 3]


def test_reserve_without_room_removes_the_oldest_other_run(small: Ramdisk) -> None:
    if not small.mounted:
        pytest.skip("needs a tmpfs of its own, which this process may not mount")
    size = small.free_bytes // 8
    for age_s, run in ((3e5, "older"), (2e5, "old"), (10, "new")):
        left = open_tier(small.path, run_id=run)
        left.reserve(size)
        left.close()
        make_old(left.path, age_s)
    tier = open_tier(small.path)
    assert {"older", "old", "new"} < {path.name for path in small.path.iterdir()}
    tier.reserve(size)
    assert {path.name for path in small.path.iterdir()} == {"old", "new", RUN_ID}
    tier.reserve(2 * size + size // 4)
    assert {path.name for path in small.path.iterdir()} == {"new", RUN_ID}
    with pytest.raises(
        RamdiskFull, match=r"other runs use \d+ bytes of it \(new\): 'eckpt doctor --clean'"
    ):
        tier.reserve(6 * size)
    assert {path.name for path in small.path.iterdir()} == {"new", RUN_ID}


def test_read_only_ramdisk_is_an_error(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    tier.reserve(LAYOUT.size_bytes)
    write_save(tier, 1)
    tier.close()
    if small.mounted:
        make_read_only(small.path)
        place = small.path
    else:
        place = Path("/proc/self/ramdisk")
    with pytest.raises(LocalTierError, match="check that local_dir is a writable directory"):
        open_tier(place)


def test_slot_is_wholly_reserved_before_it_is_written(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    size_bytes = 1 << 20
    with tier.begin_write(save_id(1), size_bytes, restores=True):
        (slot,) = tier.path.glob("slot_?.bin")
        assert slot.stat().st_blocks * 512 >= size_bytes


def test_writer_of_storage_without_room_for_its_third_slot(small: Ramdisk) -> None:
    """Local saves use the two that there are, and storage gets a copy."""
    if not small.mounted:
        pytest.skip("needs a tmpfs of its own, which this process may not mount")
    tier = open_tier(small.path)
    size = small.free_bytes // 5 * 2
    tier.reserve(size)
    tier.plan_saves(0, writes_storage=True)
    tier.reserve(size)
    for step in range(1, 4):
        complete_save(tier, step)
    assert held_steps(tier) == [2, 3]
    _, pin = pinned_save(tier, 4)
    assert not tier.may_stay_pinned()
    pin.end()
    complete_save(tier, 5)


def test_memory_limit_of_the_kernel_is_no_full_ramdisk() -> None:
    error = local_error("reserve", "slot_0.bin", OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert isinstance(error, MemoryLimitReached)


def test_ramdisk_without_inodes_says_inodes(small: Ramdisk) -> None:
    if not small.mounted:
        pytest.skip("this process may not mount a tmpfs")
    place = small.path / "few"
    place.mkdir()
    mount_tmpfs(place, 8 << 20, inodes=40)
    try:
        tier = open_tier(place)
        tier.reserve(LAYOUT.size_bytes)
        complete_save(tier, 1)
        while os.statvfs(place).f_favail:
            (place / f"filler_{os.statvfs(place).f_favail}").touch()
        host = (save_id(2), 0, 4, document(2))
        for work in (lambda: write_save(tier, 2), lambda: tier.publish_host_state(*host)):
            with pytest.raises(RamdiskFull, match=r"no free inode .*nr_inodes"):
                work()
        assert held_steps(tier) == [1]
        close_tiers()
    finally:
        unmount(place)


def test_limit_of_file_sizes_is_named(small: Ramdisk) -> None:
    tier = open_tier(small.path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with pytest.raises(LocalTierError, match=r"limit of file sizes, which is 4096 bytes here"):
            tier.reserve(LAYOUT.size_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tier.path.glob("slot_*"))
