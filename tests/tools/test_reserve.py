"""Slots made ahead: taken over whole or half made; never in the way of what counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiers_support import (
    RUN_ID,
    assert_whole,
    complete_save,
    fill,
    held_steps,
    make_old,
    open_tier,
    save_id,
    slot_files,
    write_save,
)

from emergency_ckpt import files
from emergency_ckpt.ram import LocalTier, OtherRuns, left_runs
from emergency_ckpt.tools.reserve import has_slots, reserve_slot, slot_sizes

PIECE_BYTES = 8 << 20
SIZE_BYTES = 5 * PIECE_BYTES + 4096


def _slot(ramdisk: Path, process: int = 0) -> Path:
    return ramdisk / RUN_ID / f"process_{process:05d}" / "slot_0.bin"


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _stop_after(pieces: int, ramdisk: Path) -> int:
    asked = iter(range(pieces))
    return reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES, lambda: next(asked, None) is None)


def test_reserved_slot_is_the_one_that_is_written(ramdisk: Path) -> None:
    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES) == SIZE_BYTES
    status = _slot(ramdisk).stat()
    assert (status.st_size, status.st_blocks * 512) == (SIZE_BYTES, SIZE_BYTES)
    assert slot_sizes(ramdisk)[RUN_ID][1] == SIZE_BYTES
    tier = open_tier(ramdisk)
    assert held_steps(tier) == []
    with tier.begin_write(save_id(1), SIZE_BYTES, restores=True) as writer:
        digest = writer.stage(fill(writer, save_id(1)))
        writer.publish()
    assert_whole(tier, digest, 1)
    assert slot_files(tier) == {"slot_0.bin"}
    assert _inode(_slot(ramdisk)) == status.st_ino


def test_half_made_slot_is_made_whole_before_it_is_written(ramdisk: Path) -> None:
    """Its maker was stopped."""
    assert _stop_after(2, ramdisk) == 2 * PIECE_BYTES
    inode = _inode(_slot(ramdisk))
    tier = open_tier(ramdisk)
    writer = tier.begin_write(save_id(1), SIZE_BYTES, restores=True)
    assert writer.mapping.size_bytes == SIZE_BYTES
    assert _slot(ramdisk).stat().st_blocks * 512 == SIZE_BYTES
    digest = writer.stage(fill(writer, save_id(1)))
    writer.publish()
    assert_whole(tier, digest, 1)
    assert _inode(_slot(ramdisk)) == inode


@pytest.mark.parametrize("nbytes", [3 * 4096, SIZE_BYTES + PIECE_BYTES])
def test_state_of_another_size_takes_the_slot_too(ramdisk: Path, nbytes: int) -> None:
    reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES)
    tier = open_tier(ramdisk)
    tier.reserve(nbytes)
    digest = complete_save(tier, 1)
    assert_whole(tier, digest, 1)
    sizes = {path.stat().st_size for path in tier.path.glob("slot_?.bin")}
    assert sizes == {nbytes}, "no more RAM than two slots of the state"


class _HeldMaker:
    """A maker in a thread, held before it writes its second piece until ``goes_on`` is set."""

    def __init__(self, ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, self._entered = threading.Event(), threading.Event()
        self.made: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self.made.append(reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES))
        )
        writev, pieces = os.writev, iter(range(SIZE_BYTES))

        def held(fd: int, buffers: Sequence[bytes]) -> int:
            if threading.current_thread() is self._thread and next(pieces) == 1:
                self._entered.set()
                assert self.goes_on.wait(60)
            return writev(fd, buffers)

        monkeypatch.setattr(os, "writev", held)
        self._thread.start()
        assert self._entered.wait(60)

    def finish(self) -> None:
        self.goes_on.set()
        self._thread.join(60)
        assert self.made == [2 * PIECE_BYTES], "it looks before each piece"


def test_owner_that_comes_meanwhile_ends_the_maker(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = _HeldMaker(ramdisk, monkeypatch)
    tier = open_tier(ramdisk)
    digest = complete_save(tier, 1)
    maker.finish()
    assert_whole(tier, digest, 1)
    tier.close()
    again = open_tier(ramdisk)
    assert_whole(again, digest, 1)


def test_maker_changes_no_byte_of_a_slot_that_has_grown(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has made the slot longer and filled it before the maker's write of a moment ago."""
    maker = _HeldMaker(ramdisk, monkeypatch)
    tier = open_tier(ramdisk)
    writer = tier.begin_write(save_id(1), SIZE_BYTES, restores=True)
    data = np.random.default_rng(1).integers(1, 256, SIZE_BYTES, np.uint8)
    writer.copy([(data, 0)])
    maker.finish()
    found = np.frombuffer(_slot(ramdisk).read_bytes()[:SIZE_BYTES], np.uint8)
    assert np.array_equal(found, data)
    writer.abort()
    assert_whole(tier, complete_save(tier, 2), 2)


def _kill_maker(ramdisk: Path) -> None:
    """Kill a process that makes the slot of process 0, when some pages are made."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from emergency_ckpt.tools.reserve import reserve_slot\n"
        f"reserve_slot(Path(sys.argv[1]), {RUN_ID!r}, 0, {SIZE_BYTES}, "
        "lambda: print(flush=True) or sys.stdin.read(1) == '')"
    )
    command = [sys.executable, "-c", program, str(ramdisk)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        maker.stdout.readline()
        maker.stdin.write(b".")
        maker.stdin.flush()
        maker.stdout.readline()
        maker.send_signal(signal.SIGKILL)


def test_killed_maker_leaves_a_slot_and_no_lock(ramdisk: Path) -> None:
    _kill_maker(ramdisk)
    assert list(_slot(ramdisk).parent.glob(".tmp-*"))
    tier = open_tier(ramdisk)
    assert not list(tier.path.glob(".tmp-*"))
    assert slot_files(tier) == {"slot_0.bin"}
    assert_whole(tier, complete_save(tier, 1), 1)
    tier.close()
    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES) == 0, "it has slots now"


def test_directory_with_a_slot_or_an_owner_is_left_alone(ramdisk: Path, tier: LocalTier) -> None:
    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES) == 0
    assert slot_files(tier) == set()
    digest = write_save(tier, 1)
    tier.close()
    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES) == 0
    tier = open_tier(ramdisk)
    assert_whole(tier, digest, 1)
    assert slot_files(tier) == {"slot_0.bin"}


def test_ramdisk_without_room_gets_no_slot(ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_tier(ramdisk, run_id="other")
    other.reserve(4096)
    other.close()
    make_old(other.path, 1e9)
    monkeypatch.setattr(files, "free_bytes", lambda _: SIZE_BYTES)
    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES) == 0
    assert not _slot(ramdisk).exists()
    assert [run.run_id for run in left_runs(ramdisk) if run.run_id == "other"] == ["other"]


def test_room_that_runs_out_is_given_back(ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, pieces = os.writev, iter(range(SIZE_BYTES))

    def full(fd: int, buffers: Sequence[bytes]) -> int:
        if next(pieces):
            raise OSError(28, "No space left on device")
        return writev(fd, buffers[:1])  # the room ends inside the first piece

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES)
    assert not _slot(ramdisk).exists()
    assert not list(_slot(ramdisk).parent.glob(".tmp-*"))


def test_slot_that_nobody_took_goes_with_its_run(ramdisk: Path) -> None:
    reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES)
    make_old(ramdisk / RUN_ID, 1e6)
    others = OtherRuns(ramdisk, "next run")
    assert others.give_room()
    assert not (ramdisk / RUN_ID).exists()


def test_removed_directory_ends_the_maker(ramdisk: Path) -> None:
    def stopped() -> bool:
        for path in _slot(ramdisk).parent.iterdir():
            path.unlink()
        return False

    assert reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES, stopped) == PIECE_BYTES
    assert not _slot(ramdisk).exists()


def test_two_makers_of_one_directory_make_one_slot(ramdisk: Path) -> None:
    made: list[int] = []
    makers = [
        threading.Thread(target=lambda: made.append(reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES)))
        for _ in range(4)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert sorted(made) == [0, 0, 0, SIZE_BYTES]
    assert _slot(ramdisk).stat().st_size == SIZE_BYTES


def test_maker_out_of_room_leaves_the_step_of_an_owner(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for so long that a job has begun, saved into its slot, and crashed."""
    writev, digests = os.writev, list[str]()

    def full_after_a_life(fd: int, buffers: Sequence[bytes]) -> int:
        if not digests:
            digests.append("")
            return writev(fd, buffers)
        tier = open_tier(ramdisk)
        digests[0] = complete_save(tier, 1)
        tier.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full_after_a_life)
    with pytest.raises(OSError, match="No space left"):
        reserve_slot(ramdisk, RUN_ID, 0, SIZE_BYTES)
    again = open_tier(ramdisk)
    assert_whole(again, digests[0], 1)


def test_slots_after_a_killed_maker_are_still_made(ramdisk: Path) -> None:
    """The next maker goes on with the other processes, also while one is at work."""
    _kill_maker(ramdisk)
    assert not has_slots(ramdisk, RUN_ID)
    assert [reserve_slot(ramdisk, RUN_ID, each, SIZE_BYTES) for each in (0, 1)] == [0, SIZE_BYTES]
    assert has_slots(ramdisk, RUN_ID), "the second is whole"
    _slot(ramdisk, 1).unlink()
    open_tier(ramdisk)
    assert has_slots(ramdisk, RUN_ID), "it has an owner"
