"""Slots that are mapped for the DMA of devices, by a machine that has one of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from fake_link import FakeMachine
from launch_support import wait_until
from tiers_support import (
    RUN_ID,
    W_SHARD,
    assert_whole,
    complete_save,
    held_steps,
    save_id,
    shard_bytes,
    slot_files,
    write_save,
)

from emergency_ckpt.ram import LocalTier
from emergency_ckpt.types import Writer

SIZE_BYTES = 1 << 20


LONG_S = 60.0


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine()
    yield machine
    machine.map_gate.set()
    machine.unmap_gate.set()


def open_mapped(
    ramdisk: Path, machine: FakeMachine, refused: list[str] | None = None, slots: int = 2
) -> LocalTier:
    told = [] if refused is None else refused
    writer = Writer(process_index=0, process_count=1, slice_index=0, hostname="h")
    return LocalTier(
        ramdisk,
        RUN_ID,
        writer,
        copy_threads=1,
        slots=slots,
        mapper=machine,
        on_refused=told.append,
    )


def mapped_bytes(machine: FakeMachine) -> int:
    return sum(machine.mapped.values())


def test_slots_are_mapped_once_and_unmapped_at_the_end(ramdisk: Path, machine: FakeMachine) -> None:
    tier = open_mapped(ramdisk, machine)
    tier.plan_saves(0, writes_storage=True)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 3 * SIZE_BYTES, "the mapping of slots")
    tier.prefault_in_background()  # "mapped twice" is an error of the machine
    tier.map_newest_in_background()
    assert_whole(tier, complete_save(tier, 1), 1)
    tier.close()
    assert not machine.mapped


def test_slots_are_used_where_no_thread_can_map_them(ramdisk: Path, machine: FakeMachine) -> None:
    """As at the limit of processes: the mapping is given up, and no slot is lost to it."""
    tier = open_mapped(ramdisk, machine)
    tier.reserve(SIZE_BYTES)
    usual = threading.stack_size(1 << 46)  # more than any address space has
    try:
        tier.map_newest_in_background()
        tier.prefault_in_background(SIZE_BYTES)
        for step in (1, 2, 3):
            assert_whole(tier, complete_save(tier, step), step)
    finally:
        threading.stack_size(usual)
    assert len(slot_files(tier)) == 2
    assert not machine.mapped
    tier.close()


def test_slot_that_grows_or_goes_is_unmapped_first(ramdisk: Path, machine: FakeMachine) -> None:
    tier = open_mapped(ramdisk, machine)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 2 * SIZE_BYTES, "the mapping of slots")
    tier.reserve(2 * SIZE_BYTES)
    assert not machine.mapped
    tier.prefault_in_background()
    wait_until(lambda: mapped_bytes(machine) == 4 * SIZE_BYTES, "the mapping of slots")
    with tier.begin_write(save_id(1), 3 * SIZE_BYTES):
        wait_until(lambda: mapped_bytes(machine) == 5 * SIZE_BYTES, "the mapping of what grew")
    tier.close()
    assert not machine.mapped


def test_slot_is_not_unmapped_while_a_restore_reads_it(ramdisk: Path, machine: FakeMachine) -> None:
    tier = open_mapped(ramdisk, machine)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 2 * SIZE_BYTES, "the mapping of slots")
    digest = complete_save(tier, 1)
    closing = threading.Thread(target=tier.close)
    with tier.reading(digest) as view:
        data = view(W_SHARD)
        address = data.ctypes.data
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        assert any(begin <= address < begin + size for begin, size in machine.mapped.items())
        assert data.tobytes() == shard_bytes(1)[W_SHARD]
    closing.join(60)
    assert not machine.mapped


def test_refusal_is_told_once_and_all_goes_on(ramdisk: Path, machine: FakeMachine) -> None:
    machine.limit_bytes = SIZE_BYTES + SIZE_BYTES // 2  # in the middle of the slots
    refused: list[str] = []
    tier = open_mapped(ramdisk, machine, refused)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: bool(refused), "the mapping of slots")
    tier.prefault_in_background()
    for step in range(1, 5):
        complete_save(tier, step)
    assert_whole(tier, write_save(tier, 5), 5)
    tier.reserve(2 * SIZE_BYTES)
    tier.prefault_in_background()
    tier.close()
    assert len(refused) == 1
    assert "the fake limit is reached" in refused[0]
    assert not machine.mapped


def test_slot_of_the_life_before_is_mapped_for_the_restore(
    ramdisk: Path, machine: FakeMachine
) -> None:
    before = open_mapped(ramdisk, FakeMachine())
    digest = complete_save(before, 7)
    before.close()
    tier = open_mapped(ramdisk, machine)
    assert held_steps(tier) == [7]
    tier.map_newest_in_background()
    wait_until(lambda: bool(machine.mapped), "the mapping of slots")
    with tier.reading(digest) as view:
        begin = view(W_SHARD).ctypes.data
        assert any(at <= begin < at + size for at, size in machine.mapped.items())
    tier.close()
    assert not machine.mapped


@pytest.mark.parametrize("refuses", [False, True])
def test_restore_waits_until_its_slot_is_mapped_or_refused(
    ramdisk: Path, machine: FakeMachine, *, refuses: bool
) -> None:
    """A mapper that is slow, in a process that has just begun."""
    before = open_mapped(ramdisk, FakeMachine())
    digest = complete_save(before, 7)
    before.close()
    machine.map_gate.clear()
    machine.limit_bytes = 0 if refuses else None
    tier = open_mapped(ramdisk, machine)
    tier.map_newest_in_background()
    with tier.reading(digest) as view, ThreadPoolExecutor(1) as pool:
        is_mapped = pool.submit(lambda: machine.has_mapped(view(W_SHARD)))
        waiting = wait([is_mapped], 0.2).not_done
        machine.map_gate.set()
        assert waiting
        # Less than the longest wait for a mapper that does nothing.
        assert is_mapped.result(LONG_S / 4) == (not refuses)
        assert view(W_SHARD).tobytes() == shard_bytes(7)[W_SHARD]
    tier.close()


def test_slot_that_is_read_is_mapped_before_the_others(ramdisk: Path, machine: FakeMachine) -> None:
    tier = open_mapped(ramdisk, machine, slots=3)
    tier.plan_saves(0, writes_storage=True)
    tier.reserve(SIZE_BYTES)
    machine.map_gate.clear()
    digests = [complete_save(tier, step) for step in (1, 2, 3, 4)]
    tier.prefault_in_background()
    with tier.reading(digests[1]) as view, ThreadPoolExecutor(1) as pool:
        data = pool.submit(view, W_SHARD)
        machine.map_gate.set()
        address = data.result(LONG_S).ctypes.data
    wait_until(lambda: mapped_bytes(machine) == 4 * SIZE_BYTES, "the mapping of slots")
    # The mapping of one slot, which the first save asked for, had begun before.
    first = list(machine.mapped)[:2]
    assert any(begin <= address < begin + SIZE_BYTES for begin in first)


@pytest.mark.parametrize("restores", [False, True])
def test_slot_that_a_write_makes_is_mapped(
    ramdisk: Path, machine: FakeMachine, *, restores: bool
) -> None:
    machine.map_gate.clear()
    tier = open_mapped(ramdisk, machine)
    with (
        tier.begin_write(save_id(1), SIZE_BYTES, restores=restores) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        is_mapped = pool.submit(lambda: machine.has_mapped(writer.view(0, 64)))
        waiting = wait([is_mapped], 0.2).not_done
        machine.map_gate.set()
        assert waiting
        assert is_mapped.result(LONG_S)
    wait_until(lambda: mapped_bytes(machine) == SIZE_BYTES, "the mapping of all of it")
    tier.close()
    assert not machine.mapped


def test_slot_that_goes_is_unmapped_before_its_file_is_gone(
    ramdisk: Path, machine: FakeMachine
) -> None:
    tier = open_mapped(ramdisk, machine)
    tier.plan_saves(0, writes_storage=True)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 3 * SIZE_BYTES, "the mapping of slots")
    files: list[int] = []
    machine.on_unmap = lambda: files.append(len(slot_files(tier)))
    tier.plan_saves(0, writes_storage=False)
    complete_save(tier, 1)
    assert files == [3]
    assert len(slot_files(tier)) == 2
    assert mapped_bytes(machine) == 2 * SIZE_BYTES


def complete_with_less(tier: LocalTier) -> None:
    tier.plan_saves(0, writes_storage=False)
    tier.note_complete(save_id(1))


def write_with_less(tier: LocalTier) -> None:
    tier.plan_saves(0, writes_storage=False)
    tier.begin_write(save_id(2), SIZE_BYTES).abort()


def write_after_loss(tier: LocalTier) -> None:
    shutil.rmtree(tier.path)
    tier.begin_write(save_id(2), SIZE_BYTES).abort()


def write_after_loss_of_files(tier: LocalTier) -> None:
    for file in tier.path.glob("slot_*"):
        file.unlink()
    tier.begin_write(save_id(2), SIZE_BYTES).abort()


@pytest.mark.parametrize(
    "work",
    [
        complete_with_less,
        write_with_less,
        write_after_loss,
        write_after_loss_of_files,
        LocalTier.close,
    ],
)
def test_nobody_waits_while_a_slot_is_unmapped(
    ramdisk: Path, machine: FakeMachine, work: Callable[[LocalTier], None]
) -> None:
    """Peers ask what is held meanwhile."""
    tier = open_mapped(ramdisk, machine)
    tier.plan_saves(0, writes_storage=True)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 3 * SIZE_BYTES, "the mapping of slots")
    write_save(tier, 1)
    machine.unmap_gate.clear()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(work, tier)
        assert machine.is_unmapping.wait(LONG_S)
        held = pool.submit(tier.held)
        not_blocked = held in wait([held], LONG_S / 4).done
        is_slow = not slow.done()
        machine.unmap_gate.set()
        slow.result(LONG_S)
    assert not_blocked
    assert is_slow
