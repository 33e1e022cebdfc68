"""A disk that becomes full while a step is written to it: storage, and a ramdisk."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import disk_fills_up_between_arrays, disk_fills_up_between_chunks, fill_disk
from world import LONG_S, World, save_all, small_tmpfs

from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.storage import StepLog, StorageDirectory

LEAF_BYTES, LEAVES = 1 << 20, 4
DISK_BYTES = 16 << 20


@pytest.fixture
def world(world: World) -> World:
    """Its states have leaves of a megabyte each."""

    def big(step: int) -> dict[str, Any]:
        random = np.random.default_rng(step)
        return {f"big{i}": random.integers(0, 256, LEAF_BYTES, np.uint8) for i in range(LEAVES)}

    world.more = big
    return world


def test_storage_full_between_arrays_costs_that_save_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = world.persistent.parent / "disk"
    settings = {"dir": str(disk / "run"), "buffers": Buffers(storage_bytes=LEAF_BYTES)}
    with small_tmpfs(disk, DISK_BYTES):
        with world.open_both(**settings) as checkpointer:
            save_all(checkpointer, world, 2)
            make_room = disk_fills_up_between_arrays(monkeypatch, disk)
            assert checkpointer.save(step=4, state=world.state(4))
            checkpointer.wait_until_finished()
            with pytest.raises(SaveFailed, match="No space left on device"):
                checkpointer.check_for_errors()
            save_all(checkpointer, world, 5, 7, 9)
            reader = {"local_dir": str(world.ramdisk.with_name("reader")), "save_every": 0}
            world.restores(2, host=True, **{**settings, **reader})
            make_room()
            save_all(checkpointer, world, 10)
        assert len(list(world.ramdisk.rglob("slot_*.bin"))) == 3
        world.lose_ram()
        world.restores(10, host=True, **settings)


def test_ramdisk_full_between_chunks_sends_all_by_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    with small_tmpfs(world.ramdisk, DISK_BYTES), world.open_both() as checkpointer:
        make_room = disk_fills_up_between_chunks(monkeypatch, world.ramdisk)
        _held = world.restores(4, host=True, by=checkpointer)
        full = [str(e.fields["reason"]) for e in world.named("ram.off", cause="full")]
        assert len(full) == 1
        make_room()
        save_all(checkpointer, world, 5, 6)


def test_storage_beyond_the_limit_of_file_sizes_names_it(world: World) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LEAF_BYTES // 4, before[1]))
        try:
            assert checkpointer.save(step=4, state=world.state(4))
            checkpointer.wait_until_finished()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        text = f"the process's limit of file sizes, which is {LEAF_BYTES // 4} bytes here"
        with pytest.raises(SaveFailed, match=text):
            checkpointer.check_for_errors()


def test_full_storage_keeps_no_part_of_a_small_file(tmp_path: Path) -> None:
    """Each attempt has a name of its own for its file, which no later one would remove."""
    disk, life = tmp_path / "disk", "000000000001-aaaaaaaaaaaaaaaa"
    with small_tmpfs(disk, 1 << 20):
        storage = StorageDirectory(str(disk), LONG_S)
        log = StepLog(storage)
        assert log.append(Table(1, "run", False, life))
        fill_disk(disk / "other")
        for _ in range(2):
            with pytest.raises(PersistentTierError, match="No space left on device"):
                log.append(Table(2, "run", False, life))
            with pytest.raises(PersistentTierError, match="No space left on device"):
                storage.put("host_state/log/newest", b"2")
        assert sorted(os.listdir(log.target)) == ["000000000001.json", "newest"]
