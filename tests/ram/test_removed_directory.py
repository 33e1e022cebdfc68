"""Somebody removes files under a live job: the next save makes them again, without a signal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from other_processes import other_process
from tiers_support import (
    LAYOUT,
    RUN_ID,
    W_SHARD,
    assert_whole,
    complete_save,
    document,
    held_steps,
    open_tier,
    pinned_save,
    save_id,
    shard_bytes,
    slot_files,
    write_save,
)

from emergency_ckpt.errors import LocalTierError, NotHeld
from emergency_ckpt.ram import LocalTier


def remove_contents(tier: LocalTier) -> None:
    for path in tier.path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def slot_of(tier: LocalTier, number: int) -> Path:
    return tier.path / f"slot_{number}.bin"


REMOVALS: dict[str, Callable[[LocalTier], object]] = {
    "process directory": lambda tier: shutil.rmtree(tier.path),
    "run": lambda tier: shutil.rmtree(tier.path.parent),
    "local_dir": lambda tier: shutil.rmtree(tier.path.parents[1]),
    "contents": remove_contents,
    "slot 0": lambda tier: slot_of(tier, 0).unlink(),
    "slot 1": lambda tier: slot_of(tier, 1).unlink(),
    "cut slot 0": lambda tier: os.truncate(slot_of(tier, 0), 0),
    "cut slot 1": lambda tier: os.truncate(slot_of(tier, 1), 0),
    "host states": lambda tier: shutil.rmtree(tier.path / "host_state"),
    "quarantine": lambda tier: shutil.rmtree(tier.path / "quarantine"),
    "owner.lock": lambda tier: (tier.path / "owner.lock").unlink(),
    "reader.lock": lambda tier: (tier.path / "reader.lock").unlink(),
}


def save_with_host_state(tier: LocalTier, step: int) -> str:
    digest = write_save(tier, step)
    tier.publish_host_state(save_id(step), 0, 4, document(step))
    tier.note_complete(save_id(step))
    return digest


@pytest.mark.parametrize("removed", REMOVALS)
def test_save_after_a_removal_makes_it_again(ramdisk: Path, removed: str) -> None:
    local_dir = ramdisk / "eckpt"
    tier = open_tier(local_dir)
    tier.reserve(LAYOUT.size_bytes)
    for step in (1, 2):
        save_with_host_state(tier, step)
    REMOVALS[removed](tier)
    digests = [save_with_host_state(tier, step) for step in (3, 4)]
    assert held_steps(tier) == [3, 4]
    assert len(slot_files(tier)) == 2
    # The lock is held still: a later start cannot take the directory.
    with pytest.raises(LocalTierError, match="this process has a checkpointer"):
        open_tier(local_dir, start="another")
    tier.close()
    again = open_tier(local_dir, start="another")
    for digest, step in zip(digests, (3, 4), strict=True):
        assert_whole(again, digest, step)
    assert again.host_state_bytes(save_id(4), 0, 4) == document(4)


def test_buddys_host_state_after_a_removal_is_kept(tier: LocalTier) -> None:
    shutil.rmtree(tier.path)
    tier.publish_host_state(save_id(1), 3, 4, document(1, owner=3))
    assert (tier.path / "host_state").exists()
    assert tier.host_state_bytes(save_id(1), 3, 4) == document(1, owner=3)


def test_read_of_a_cut_slot_is_no_signal(tier: LocalTier) -> None:
    digest = complete_save(tier, 1)
    os.truncate(slot_of(tier, 0), 0)
    with pytest.raises(NotHeld, match="cut"):
        tier.verify(digest, [0])


def test_memory_that_is_read_survives_the_removal(tier: LocalTier) -> None:
    with tier.reading(complete_save(tier, 1)) as view:
        data = view(3)
        before = data.tobytes()
        shutil.rmtree(tier.path)
        for step in (2, 3, 4):
            complete_save(tier, step)
        assert data.tobytes() == before


def test_lock_that_was_removed_is_made_again_around_used_slots(ramdisk: Path) -> None:
    """A save to storage that reads the slot for minutes does not find a later save's bytes."""
    tier = open_tier(ramdisk)
    tier.plan_saves(0, writes_storage=True)
    tier.reserve(LAYOUT.size_bytes)
    digest, pin = pinned_save(tier, 2)
    with tier.reading(digest) as view:
        (tier.path / "owner.lock").unlink()
        for step in range(3, 8):
            complete_save(tier, step)
        expected = shard_bytes(2)[W_SHARD]
        place = LAYOUT.shards[W_SHARD]
        assert pin.view(place.offset, place.nbytes).tobytes() == expected
        assert view(W_SHARD).tobytes() == expected
    assert tier.is_intact()
    pin.end()
    with pytest.raises(LocalTierError, match="this process has a checkpointer"):
        open_tier(ramdisk, start="another")


def test_directory_that_another_has_locked_since_is_left_to_it(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    complete_save(tier, 1)
    (tier.path / "owner.lock").unlink()
    with (
        other_process(ramdisk, "hold", RUN_ID),
        pytest.raises(LocalTierError, match="has taken the directory"),
    ):
        complete_save(tier, 2)


def test_shard_is_read_first_after_the_removal(tier: LocalTier) -> None:
    """A peer that pushes its host state makes the directory again, and closes no slot in use."""
    expected = shard_bytes(1)
    with tier.reading(complete_save(tier, 1)) as view:
        shutil.rmtree(tier.path)
        tier.publish_host_state(save_id(2), 3, 4, document(2, owner=3))
        assert [view(shard).tobytes() for shard in range(len(expected))] == expected
    complete_save(tier, 3)
    assert held_steps(tier) == [3]
