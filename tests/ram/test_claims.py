"""Who owns which directory: real processes hold the locks, and die."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest
from other_processes import other_process
from tiers_support import (
    RUN_ID,
    W_SHARD,
    assert_whole,
    complete_save,
    document,
    held_steps,
    open_tier,
    save_id,
    shard_bytes,
    write_save,
)

from emergency_ckpt.ram import left_runs, remove_run
from emergency_ckpt.ram import locks as claims


def names(ramdisk: Path, run_id: str = RUN_ID) -> list[str]:
    return sorted(path.name for path in (ramdisk / run_id).iterdir())


def test_live_owner_keeps_its_directory(ramdisk: Path) -> None:
    with other_process(ramdisk, "hold", RUN_ID) as lines:
        assert lines[0] == "process_00000"
        tier = open_tier(ramdisk)
        assert tier.path.name == "process_00000.1"
        tier.adopt_orphans()
        tier.release_orphans()
        assert names(ramdisk) == ["process_00000", "process_00000.1"]
        tier.close()
    again = open_tier(ramdisk)  # its owner is dead, its lock with it
    assert again.path.name == "process_00000"


def test_permuted_processes_find_a_directory_each(ramdisk: Path) -> None:
    tier = open_tier(ramdisk, process_index=2)
    digest = complete_save(tier, 1)
    tier.close()
    other = open_tier(ramdisk, process_index=5)
    assert other.path.name == "process_00002"
    assert_whole(other, digest, 1)
    third = open_tier(ramdisk, process_index=2)
    assert third.path.name == "process_00002.1"


def test_processes_that_start_together_get_a_directory_each(ramdisk: Path) -> None:
    with contextlib.ExitStack() as stack:
        started: list[list[str]] = []

        def start(index: int) -> None:
            running = other_process(ramdisk, "claim", str(index))
            started.append(stack.enter_context(running))

        threads = [threading.Thread(target=start, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        claimed = [lines[0] for lines in started]
    assert len(claimed) == 3
    assert len(set(claimed)) == 3


def test_nothing_but_our_own_names_is_ever_deleted(ramdisk: Path) -> None:
    dead = open_tier(ramdisk, run_id="dead")
    path = dead.path
    dead.close()
    (path / "notes.txt").write_text("keep me")
    (path / "host_state" / "mine").mkdir()
    (path / "host_state" / "mine" / "data").write_text("keep me too")
    outside = ramdisk / "precious"
    outside.mkdir()
    (outside / "slot_0.bin").write_text("not ours")
    unlocked = ramdisk / "other" / "process_00000"
    unlocked.mkdir(parents=True)
    (unlocked / "slot_0.bin").write_text("never claimed")
    (path / "slot_5.bin").symlink_to(outside / "slot_0.bin")
    (ramdisk / "linked").symlink_to(outside)
    for run in left_runs(ramdisk):
        remove_run(run)
    assert (path / "notes.txt").read_text() == "keep me"
    assert (path / "host_state" / "mine" / "data").read_text() == "keep me too"
    assert (outside / "slot_0.bin").read_text() == "not ours"
    assert (unlocked / "slot_0.bin").read_text() == "never claimed"
    assert not (path / "slot_5.bin").is_symlink()


def test_orphans_are_offered_until_they_are_released(ramdisk: Path) -> None:
    gone = [open_tier(ramdisk, process_index=index) for index in (0, 1)]
    digests = [write_save(tier, step) for tier, step in zip(gone, (1, 2), strict=True)]
    gone[1].publish_host_state(save_id(2), 1, 4, b_document())
    for tier in gone:
        tier.close()
    tier = open_tier(ramdisk, process_index=0)
    assert held_steps(tier) == [1]
    tier.adopt_orphans()
    tier.adopt_orphans()
    assert held_steps(tier) == [1, 2]
    assert [held.owner for held in tier.held()[1]] == [1]
    assert tier.host_state_bytes(save_id(2), 1, 4) == b_document()
    assert_whole(tier, digests[1], 2)
    with tier.reading(digests[1]) as view:
        data = view(W_SHARD)
        tier.release_orphans()
        assert held_steps(tier) == [1]
        assert names(ramdisk) == ["process_00000"]
        assert data.tobytes() == shard_bytes(2)[W_SHARD]


def b_document() -> bytes:
    return document(2, owner=1)


def test_orphans_newer_than_the_restored_save_are_invalidated(ramdisk: Path) -> None:
    gone = open_tier(ramdisk, process_index=1)
    complete_save(gone, 40)
    mine = open_tier(ramdisk, process_index=0)
    write_save(mine, 35)
    gone.close()
    mine.adopt_orphans()
    assert held_steps(mine) == [35, 40]
    mine.invalidate_newer(save_id(35))
    assert held_steps(mine) == [35]
    assert mine.held()[2] == save_id(35)
    mine.close()
    again = open_tier(ramdisk, process_index=1)
    assert held_steps(again) == []


def test_orphan_that_is_served_stays_when_released(ramdisk: Path) -> None:
    open_tier(ramdisk, process_index=1).close()
    mine = open_tier(ramdisk, process_index=9)
    second = open_tier(ramdisk, process_index=0)
    mine.close()
    second.adopt_orphans()
    with other_process(ramdisk, "serve", RUN_ID):
        second.release_orphans()
        assert len(names(ramdisk)) == 2


@pytest.mark.parametrize("is_new", [False, True])
def test_directory_deleted_while_it_is_locked_is_not_claimed(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    """The lock that is got is on a file that nobody finds any more."""
    path = ramdisk / "contested" / "process_00000"
    if not is_new:
        before = claims.claim_directory(ramdisk, "contested", 0)
        assert isinstance(before, claims.Claim)
        before.release()
    lock = fcntl.flock

    def lock_what_is_gone(fd: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        shutil.rmtree(path)
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock_what_is_gone)
    if not is_new:
        assert claims.claim_existing(path, "another") is None
        assert not path.exists()
    claim = claims.claim_directory(ramdisk, "contested", 0)
    assert isinstance(claim, claims.Claim)
    assert claim.path == path
    assert path.samefile(f"/proc/self/fd/{claim.dir_fd}"), "it is of what is at the path"
    claim.release()


def test_directory_that_another_makes_first_is_looked_at_again(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = os.path.lexists

    def make_first(path: Path) -> bool:
        monkeypatch.setattr(os.path, "lexists", exists)
        path.mkdir(mode=0o700)
        return False

    monkeypatch.setattr(os.path, "lexists", make_first)
    claim = claims.claim_directory(ramdisk, "contested", 0)
    assert isinstance(claim, claims.Claim)
    assert names(ramdisk, "contested") == ["process_00000"]
    claim.release()


def test_locked_directory_of_another_name_cannot_be_taken_twice(ramdisk: Path) -> None:
    first = open_tier(ramdisk)
    assert isinstance(claims.claim_existing(first.path, "another"), claims.Holder)
    first.close()
    claim = claims.claim_existing(first.path, "another")
    assert isinstance(claim, claims.Claim)
    claim.release()
    claim.release()


def test_claim_that_is_interrupted_is_free_again(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, after which a notebook goes on: nobody would end the lock before that does."""
    opened = os.open

    def interrupted(path: str | Path, *args: int, **options: int) -> int:
        if path == claims.READER_LOCK:
            raise KeyboardInterrupt
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_tier(ramdisk)
    monkeypatch.undo()
    assert open_tier(ramdisk).path.name == "process_00000"
    assert names(ramdisk) == ["process_00000"]
