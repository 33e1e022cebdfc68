"""Slots that are mapped for the DMA of devices, by a machine that has one of its own."""

from __future__ import annotations

import threading
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
    write_save,
)

from emergency_ckpt.ram import LocalTier
from emergency_ckpt.types import Writer

SIZE_BYTES = 1 << 20


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


def open_mapped(ramdisk: Path, machine: FakeMachine, refused: list[str] | None = None) -> LocalTier:
    told = [] if refused is None else refused
    writer = Writer(process_index=0, process_count=1, slice_index=0, hostname="h")
    return LocalTier.open(
        ramdisk, RUN_ID, writer, copy_threads=1, mapper=machine, on_refused=told.append
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


def test_slot_that_grows_or_goes_is_unmapped_first(ramdisk: Path, machine: FakeMachine) -> None:
    tier = open_mapped(ramdisk, machine)
    tier.prefault_in_background(SIZE_BYTES)
    wait_until(lambda: mapped_bytes(machine) == 2 * SIZE_BYTES, "the mapping of slots")
    tier.reserve(2 * SIZE_BYTES)
    assert not machine.mapped
    tier.prefault_in_background()
    wait_until(lambda: mapped_bytes(machine) == 4 * SIZE_BYTES, "the mapping of slots")
    with tier.begin_write(save_id(1), 3 * SIZE_BYTES):
        assert mapped_bytes(machine) == 2 * SIZE_BYTES
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
