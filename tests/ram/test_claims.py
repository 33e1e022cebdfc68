"""Who owns which directory: real processes hold the locks, and die."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
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

from emergency_ckpt.background import run_in_thread
from emergency_ckpt.errors import RamdiskFull
from emergency_ckpt.ram import left_runs, remove_run
from emergency_ckpt.ram import locks as claims
from emergency_ckpt.ram.process_directory import ProcessDirectory


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


@pytest.mark.parametrize("is_orphan", [False, True])
def test_scan_that_is_interrupted_ends_its_claim(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, *, is_orphan: bool
) -> None:
    """Whatever ends it: the next start in this process finds the directory free."""
    left = open_tier(ramdisk, process_index=0)
    adopt = open_tier(ramdisk, process_index=1).adopt_orphans
    left.close()

    def interrupted(_: int) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "listdir", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        adopt() if is_orphan else open_tier(ramdisk)
    monkeypatch.undo()
    claim = claims.claim_existing(left.path, "another")
    assert isinstance(claim, claims.Claim), caught
    claim.release()


def as_folder(lock: Path) -> None:
    lock.mkdir(mode=0o700)
    (lock / "theirs").write_text("kept")


def as_socket(lock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(lock))


NO_LOCKS: dict[str, Callable[[Path], None]] = {
    "pipe": lambda lock: os.mkfifo(lock, 0o600),
    "link": lambda lock: lock.symlink_to("host_state"),
    "folder": as_folder,
    "socket": as_socket,
}


@pytest.mark.parametrize("name", ["owner.lock", "reader.lock"])
@pytest.mark.parametrize("plant", NO_LOCKS.values(), ids=NO_LOCKS)
def test_claim_replaces_what_is_no_lock_and_loses_no_save(
    ramdisk: Path, plant: Callable[[Path], None], name: str
) -> None:
    orphan, own = [open_tier(ramdisk, process_index=index) for index in (0, 1)]
    complete_save(orphan, 1)
    complete_save(own, 2)
    for path in (orphan.path, own.path):
        (path / name).unlink()
        plant(path / name)
    orphan.close()
    own.close()
    assert claims.current_holder(own.path) is None
    tier = open_tier(ramdisk, process_index=1)
    assert tier.path == own.path
    assert held_steps(tier) == [2]
    tier.adopt_orphans()
    assert held_steps(tier) == [1, 2]
    for path in (orphan.path, own.path):
        assert stat.filemode((path / name).lstat().st_mode) == "-rw-------"
        kept = [aside / "theirs" for aside in path.glob("aside-*")]
        assert [each.read_text() for each in kept] == (["kept"] if plant is as_folder else [])
    assert tier.is_intact()
    assert isinstance(claims.claim_existing(own.path, "another"), claims.Holder)
    reader = claims.read_claim(own.path)
    assert reader is not None
    reader.release()


def test_lock_open_to_others_keeps_its_holder(ramdisk: Path) -> None:
    """Its directory is closed to them, so it is as good as any other."""
    tier = open_tier(ramdisk)
    complete_save(tier, 1)
    lock = tier.path / "owner.lock"
    lock.chmod(0o660)
    held = lock.stat().st_ino
    assert isinstance(claims.claim_existing(tier.path, "another"), claims.Holder)
    assert isinstance(claims.current_holder(tier.path), claims.Holder)
    tier.close()
    again = open_tier(ramdisk)
    assert held_steps(again) == [1]
    assert again.path == tier.path
    assert lock.stat().st_ino == held
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "its record is believed"


def test_readers_lock_open_to_others_keeps_its_reader(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    tier.close()
    reader = claims.read_claim(tier.path)
    assert reader is not None
    (tier.path / "reader.lock").chmod(0o660)
    claim = claims.claim_existing(tier.path, "another")
    assert isinstance(claim, claims.Claim)
    assert claim.is_served()
    assert not claim.delete()
    second = claims.read_claim(tier.path)
    assert second is not None
    reader.release()
    second.release()


def test_claim_removes_no_lock_that_another_made_meanwhile(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes found a pipe; the second comes to it when the first has its lock there."""
    tier = open_tier(ramdisk)
    tier.close()
    (tier.path / "owner.lock").unlink()
    os.mkfifo(tier.path / "owner.lock")
    first: list[claims.Claim | claims.Holder | None] = []
    lock = fcntl.flock

    def lock_after_the_first(fd: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.append(claims.claim_existing(tier.path, "first"))
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_first)
    second = claims.claim_existing(tier.path, "second")
    (claim,) = first
    assert isinstance(claim, claims.Claim)
    assert isinstance(second, claims.Holder)
    assert claim.is_in_place()
    claim.release()


@pytest.mark.parametrize("name", ["owner.lock", "reader.lock"])
def test_claim_without_room_for_a_lock_says_so(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A lock that cannot be made is not gone, and is not another user's."""
    opened = os.open

    def without_room(path: str | Path, *args: int, **options: int) -> int:
        if path == name:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", without_room)
    with pytest.raises(RamdiskFull):
        open_tier(ramdisk)


@pytest.mark.parametrize("plant", NO_LOCKS.values(), ids=NO_LOCKS)
def test_reader_of_directory_is_told_of_what_is_no_lock(
    ramdisk: Path, plant: Callable[[Path], None]
) -> None:
    tier = open_tier(ramdisk)
    tier.close()
    (tier.path / "reader.lock").unlink()
    plant(tier.path / "reader.lock")
    with pytest.raises(OSError, match="it is no lock file"):
        claims.read_claim(tier.path)


def test_orphans_are_deleted_beside_other_work(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel frees a large slot for seconds, while peers push their host states."""
    former, tier = (open_tier(ramdisk, process_index=index) for index in (9, 0))
    complete_save(former, 1)
    former.close()
    tier.adopt_orphans()
    delete = ProcessDirectory.delete
    deletes, may_end = threading.Event(), threading.Event()

    def slow(place: ProcessDirectory) -> bool:
        deletes.set()
        assert may_end.wait(60.0)
        return delete(place)

    monkeypatch.setattr(ProcessDirectory, "delete", slow)
    released = run_in_thread("release", tier.release_orphans)
    try:
        assert deletes.wait(60.0)
        pushed = run_in_thread(
            "push", lambda: tier.publish_host_state(save_id(2), 3, 4, document(2, owner=3))
        )
        pushed.result(60.0)
        assert tier.held()[1] != ()
    finally:
        may_end.set()
    released.result(60.0)
    assert names(ramdisk) == ["process_00000"]
