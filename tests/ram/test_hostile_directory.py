"""Whatever lies in a process directory: opening it never raises, and nothing leads out of it."""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import random
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from damage import flip
from tiers_support import (
    LAYOUT,
    assert_whole,
    complete_save,
    document,
    files_of,
    held_steps,
    open_tier,
    save_id,
    write_save,
)
from world import World, save_all

from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, MAX_HOST_STATE_SAVES
from emergency_ckpt.core.restore.inventory import RestoredSave
from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.errors import CorruptData, HostStateError, HostStatesFull, LocalTierError
from emergency_ckpt.ram import LocalTier, build_contents, left_runs, remove_run
from emergency_ckpt.ram.process_files import LEDGER_FILE, Ledger

MANIFEST, SLOT = "slot_0.manifest.json", "slot_0.bin"


def flip_in_manifest(path: Path) -> None:
    flip(path / MANIFEST)


def huge_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()
    with open(path / MANIFEST, "wb") as file:
        file.truncate((64 << 20) + 1)


def manifest_of_another_run(path: Path) -> None:
    other = open_tier(path.parent.parent / "elsewhere", run_id="another")
    save = save_id(1, run_id="another")
    writer = other.begin_write(save, 0)
    writer.stage(build_contents(save, [], lay_out([], []), []))
    writer.publish()
    shutil.copy(other.path / MANIFEST, path / MANIFEST)
    other.close()


def moved_behind_a_link(file: Path) -> None:
    outside = file.parents[2] / f"outside{file.suffix}"
    shutil.move(file, outside)
    file.symlink_to(outside)


def replaced(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink()
    make(file)


def hole_larger_than_the_ramdisk(file: Path) -> None:
    status = os.statvfs(file)
    os.truncate(file, status.f_blocks * status.f_frsize * 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "manifest truncated": lambda path: os.truncate(path / MANIFEST, 100),
    "manifest empty": lambda path: os.truncate(path / MANIFEST, 0),
    "manifest flipped": flip_in_manifest,
    "manifest huge": huge_manifest,
    "manifest of another run": manifest_of_another_run,
    "manifest as link": lambda path: moved_behind_a_link(path / MANIFEST),
    "manifest as pipe": lambda path: replaced(path / MANIFEST, os.mkfifo),
    "manifest as directory": lambda path: replaced(path / MANIFEST, os.mkdir),
    "slot gone": lambda path: (path / SLOT).unlink(),
    "slot truncated": lambda path: os.truncate(path / SLOT, 4096),
    "slot empty": lambda path: os.truncate(path / SLOT, 0),
    "slot as link": lambda path: moved_behind_a_link(path / SLOT),
    "slot as pipe": lambda path: replaced(path / SLOT, os.mkfifo),
    "slot as directory": lambda path: replaced(path / SLOT, os.mkdir),
    "slot with a hole": lambda path: hole_larger_than_the_ramdisk(path / SLOT),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_quarantined_and_the_other_save_stays(
    ramdisk: Path, damage: Callable[[Path], None]
) -> None:
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    write_save(tier, 1)
    digest = write_save(tier, 2)
    tier.close()
    damage(tier.path)

    again = open_tier(ramdisk)
    assert held_steps(again) == [2]
    assert len(again.quarantined) == 1
    assert len(list((again.path / "quarantine").iterdir())) == 1
    assert_whole(again, digest, 2)
    again.protect([save_id(2)])
    again.reserve(LAYOUT.size_bytes)
    newest = write_save(again, 3)
    assert_whole(again, newest, 3)
    again.close()
    third = open_tier(ramdisk)
    assert held_steps(third) == [2, 3]
    third.close()
    for outside in ramdisk.glob("outside.*"):
        assert outside.stat().st_size > 0


@pytest.mark.parametrize("name", ["slot_01.bin", "slot_01.manifest.json", "slot_\u0661.bin"])
def test_file_named_almost_as_a_slot_costs_no_save(
    ramdisk: Path, tier: LocalTier, name: str
) -> None:
    """It is a stranger's, as any other name: the newest save is in slot 1."""
    tier.reserve(LAYOUT.size_bytes)
    complete_save(tier, 1)
    complete_save(tier, 2)
    tier.close()
    assert b'"step":2' in (tier.path / "slot_1.manifest.json").read_bytes()
    (tier.path / name).write_bytes(b"theirs")
    for _ in range(2):
        with closing(open_tier(ramdisk)) as again:
            assert held_steps(again) == [1, 2]
            assert again.quarantined == ()
            again.note_complete(save_id(2))
            assert held_steps(again) == [1, 2]
    for run in left_runs(ramdisk):
        remove_run(run)
    assert [path.name for path in tier.path.iterdir()] == [name]
    assert (tier.path / name).read_bytes() == b"theirs"


@pytest.mark.parametrize("name", ["ledger.json", "owner.lock"])
def test_damaged_small_files(ramdisk: Path, tier: LocalTier, name: str) -> None:
    complete_save(tier, 1)
    tier.close()
    (tier.path / name).write_bytes(b"\x00garbage")
    again = open_tier(ramdisk)
    assert held_steps(again) == [1]
    expected = None if name == "ledger.json" else save_id(1)
    assert again.held()[2] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"restored": RestoredSave(save_id(1), 0)},
        {"restored": RestoredSave(save_id(1), 1 << 60)},
        {"restored": RestoredSave(save_id(-1), 1)},
        {"finite": save_id(1, run_id="another")},
    ],
)
def test_impossible_fields_of_a_ledger(
    ramdisk: Path, tier: LocalTier, changes: dict[str, Any]
) -> None:
    complete_save(tier, 1)
    tier.close()
    ledger = Ledger("000000000001-first", complete=save_id(1), **changes)
    (tier.path / "ledger.json").write_bytes(LEDGER_FILE.encode(ledger))
    again = open_tier(ramdisk)
    assert held_steps(again) == [1]
    assert again.held()[2] is None
    assert again.restored() == ()
    assert again.finite is None


def test_leftover_temporaries_are_removed(ramdisk: Path, tier: LocalTier) -> None:
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    tier.close()
    places = [tier.path, tier.path / "quarantine", *(tier.path / "host_state").iterdir()]
    for place in places:
        (place / ".tmp-123-0-slot_0.manifest.json").write_bytes(b"half")
    again = open_tier(ramdisk)
    assert not list(tier.path.rglob(".tmp-*"))
    assert again.quarantined == ()


def folder(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "theirs").write_text("kept")


def in_place_of(directory: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(directory)
    make(directory)


SAVE = "host_state/000000000001-first-1"
STRANGERS: dict[str, Callable[[Path], None]] = {
    "folder as temporary": lambda path: folder(path / ".tmp-x"),
    "folder as temporary record": lambda path: folder(path / "quarantine" / ".tmp-x"),
    "folder as temporary document": lambda path: folder(path / SAVE / ".tmp-x"),
    "folder as ledger": lambda path: replaced(path / "ledger.json", folder),
    "file as quarantine": lambda path: in_place_of(
        path / "quarantine", lambda place: place.write_text("kept")
    ),
    "link as quarantine": lambda path: in_place_of(
        path / "quarantine", lambda place: place.symlink_to(path.parents[1] / "elsewhere")
    ),
    "pipe as quarantine": lambda path: in_place_of(path / "quarantine", os.mkfifo),
    "file as host states": lambda path: in_place_of(
        path / "host_state", lambda place: place.write_text("kept")
    ),
    "link as host states": lambda path: in_place_of(
        path / "host_state", lambda place: place.symlink_to(path.parents[1] / "elsewhere")
    ),
}


@pytest.mark.parametrize("plant", STRANGERS.values(), ids=STRANGERS)
def test_entry_of_a_stranger_stays_and_stops_no_start(
    ramdisk: Path, tier: LocalTier, plant: Callable[[Path], None]
) -> None:
    folder(ramdisk / "elsewhere")
    complete_save(tier, 1)
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    tier.close()
    plant(tier.path)
    planted = sum(path.is_file() and path.stat().st_size == 4 for path in ramdisk.rglob("*"))
    for _ in range(2):
        with closing(open_tier(ramdisk)) as again:
            assert again.path == tier.path
            assert held_steps(again) == [1]
            again.publish_host_state(save_id(1), 0, 4, document(1))
            assert again.host_state_bytes(save_id(1), 0, 4) == document(1)
            again.quarantine("0" * 64, None, "a test")
            records = (again.path / "quarantine").glob("[0-9]*.json")
            assert any(b"a test" in record.read_bytes() for record in records)
    kept = [path for path in ramdisk.rglob("*") if path.is_file() and path.stat().st_size == 4]
    assert [path.read_text() for path in kept] == ["kept"] * planted
    assert [path.name for path in (ramdisk / "elsewhere").iterdir()] == ["theirs"]


def test_orphan_with_a_strangers_folders_is_released(ramdisk: Path) -> None:
    orphan = open_tier(ramdisk, process_index=0)
    tier = open_tier(ramdisk, process_index=1)
    complete_save(orphan, 1)
    orphan.close()
    for name in (".tmp-x", "slot_5.bin", "slot_6.manifest.json", "quarantine/.tmp-x"):
        folder(orphan.path / name)
    tier.adopt_orphans()
    assert held_steps(tier) == [1]
    tier.release_orphans()
    assert held_steps(tier) == []
    assert not list(orphan.path.glob("slot_0.*"))
    assert [path.read_text() for path in orphan.path.rglob("theirs")] == ["kept"] * 4


def test_random_bytes_anywhere_never_stop_an_open(ramdisk: Path) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        tier = open_tier(ramdisk)
        tier.protect([])
        step = 1 + seed
        complete_save(tier, step)
        tier.publish_host_state(save_id(step), 0, 4, document(step))
        tier.close()
        small = [
            path
            for path in sorted(tier.path.rglob("*"))
            if path.suffix == ".json" and path.parent.name != "quarantine"
        ]
        victim = rng.choice(small)
        data = bytearray(victim.read_bytes())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        victim.write_bytes(bytes(data[: rng.randint(1, len(data))]))
    tier = open_tier(ramdisk)
    tier.held()


def test_host_states_of_another_name_are_not_believed(ramdisk: Path, tier: LocalTier) -> None:
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    tier.publish_host_state(save_id(1), 1, 4, document(1, 1))
    tier.publish_host_state(save_id(2), 0, 4, document(2))
    tier.close()
    saves = tier.path / "host_state"
    first = saves / "000000000001-first-1"
    shutil.copy(first / "process_00000_of_00004.json", first / "process_00002_of_00004.json")
    shutil.copy(
        first / "process_00001_of_00004.json",
        saves / "000000000001-first-2" / "process_00001_of_00004.json",
    )
    (saves / "file").write_text("x")
    (first / "process_00003_of_00004.json").symlink_to(first / "process_00000_of_00004.json")
    again = open_tier(ramdisk)
    assert [(held.save.step, held.owner) for held in again.held()[1]] == [(1, 0), (1, 1), (2, 0)]
    assert len(again.quarantined) == 4


def test_name_that_is_no_utf8_is_quarantined_with_escapes(ramdisk: Path, tier: LocalTier) -> None:
    complete_save(tier, 1)
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    tier.close()
    with open(bytes(tier.path / "host_state") + b"/note-\xff", "w"):
        pass
    for life in (1, 2):
        with closing(open_tier(ramdisk)) as again:
            assert again.path == tier.path
            assert held_steps(again) == [1]
            (told,) = again.quarantined
            assert told.name == r"note-\udcff"
            assert told.problem.startswith(r"open note-\udcff: ")
            records = list((again.path / "quarantine").iterdir())
            assert [json.loads(each.read_bytes())["name"] for each in records] == life * [told.name]


def test_pushes_are_checked(tier: LocalTier) -> None:
    good = document(1, 2)
    tier.publish_host_state(save_id(1), 2, 4, good)
    tier.publish_host_state(save_id(1), 2, 4, good)
    assert tier.host_state_bytes(save_id(1), 2, 4) == good
    assert tier.host_state_bytes(save_id(1), 2, 5) is None
    with pytest.raises(CorruptData, match="another process"):
        tier.publish_host_state(save_id(1), 3, 4, good)
    with pytest.raises(CorruptData, match="another process"):
        tier.publish_host_state(save_id(2), 2, 4, good)
    with pytest.raises(CorruptData):
        tier.publish_host_state(save_id(1), 2, 4, b"{}")
    with pytest.raises(HostStateError, match="published already"):
        tier.publish_host_state(save_id(1), 2, 4, document(1, 2, value=18))
    with pytest.raises(CorruptData, match="too long"):
        tier.publish_host_state(save_id(1), 2, 4, bytes(MAX_HOST_STATE_BYTES + 1))
    foreign = json.loads(good)
    foreign["save"]["run_id"] = "another"
    data = json.dumps(foreign, separators=(",", ":")).encode()
    with pytest.raises(HostStateError, match="another run"):
        tier.publish_host_state(save_id(1, run_id="another"), 2, 4, data)
    assert [held.owner for held in tier.held()[1]] == [2]


def test_damaged_host_state_is_mended_by_publishing_it_again(tier: LocalTier) -> None:
    good = document(1)
    tier.publish_host_state(save_id(1), 0, 4, good)
    path = tier.path / "host_state" / "000000000001-first-1" / "process_00000_of_00004.json"
    path.write_bytes(b"damaged")
    assert tier.host_state_bytes(save_id(1), 0, 4) == b"damaged"
    tier.publish_host_state(save_id(1), 0, 4, good)
    assert path.read_bytes() == good
    path.unlink()
    assert tier.host_state_bytes(save_id(1), 0, 4) is None


def test_folder_in_place_of_a_host_state_is_moved_aside(tier: LocalTier) -> None:
    path = tier.path / "host_state" / "000000000001-first-1" / "process_00000_of_00004.json"
    path.parent.mkdir(mode=0o700)
    path.mkdir()
    (path / "theirs").write_text("kept")
    good = document(1)
    tier.publish_host_state(save_id(1), 0, 4, good)
    assert tier.host_state_bytes(save_id(1), 0, 4) == good
    (aside,) = path.parent.glob("aside-*")
    assert (aside / "theirs").read_text() == "kept"


def test_buddies_cannot_fill_the_ramdisk(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many saves, or too many bytes: the oldest go, the complete one stays."""
    tier.note_complete(save_id(1))
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    newest = 52 + MAX_HOST_STATE_SAVES
    for step in range(2, newest):
        tier.publish_host_state(save_id(step), 1, 4, document(step, 1))
    steps = [held.save.step for held in tier.held()[1]]
    assert steps == [1, *range(53, newest)]
    with pytest.raises(HostStatesFull, match="newer ones"):
        tier.publish_host_state(save_id(2), 1, 4, document(2, 1))

    monkeypatch.setattr("emergency_ckpt.ram.process_directory.MAX_DOCUMENTS_BYTES", 1 << 20)
    big = b"x" * (32 << 10)
    for step in range(newest, newest + 60):
        tier.publish_host_state(save_id(step), step % 4, 4, document(step, step % 4, value=big))
    for owner in range(4):
        tier.publish_host_state(save_id(500), owner, 4, document(500, owner, value=big))
    total = sum(path.stat().st_size for path in (tier.path / "host_state").rglob("*.json"))
    assert total <= 1 << 20
    assert tier.held()[1][0].save.step == 1
    assert len(list((tier.path / "host_state").iterdir())) <= MAX_HOST_STATE_SAVES


def test_modes_of_new_files_do_not_depend_on_the_umask(ramdisk: Path) -> None:
    before = os.umask(0)
    try:
        tier = open_tier(ramdisk / "new")
        write_save(tier, 1)
        tier.close()
    finally:
        os.umask(before)
    for path in (ramdisk / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_tier_that_was_closed_writes_nothing(tier: LocalTier) -> None:
    tier.note_complete(save_id(3))
    tier.close()
    before = files_of(tier)
    with pytest.raises(LocalTierError):
        tier.publish_host_state(save_id(1), 0, 4, document(1))
    with pytest.raises(LocalTierError):
        write_save(tier, 1)
    with pytest.raises(LocalTierError):
        tier.reserve(1)
    with pytest.raises(LocalTierError):
        tier.note_complete(save_id(1))
    tier.invalidate_newer(save_id(0))
    assert tier.held() == ((), (), None)
    assert files_of(tier) == before


def test_slot_cut_behind_its_last_shard_is_whole(world: World) -> None:
    """Bytes behind the last shard have no meaning. The cut is inside a page."""
    with world.open() as ckpt:
        save_all(ckpt, world, 3)
    (manifest,) = world.ramdisk.rglob("slot_*.manifest.json")
    last = json.loads(manifest.read_bytes())["manifest"]["contents"]["shards"][-1]
    end = last["offset"] + last["nbytes"]
    assert end % mmap.PAGESIZE
    os.truncate(str(manifest).replace(".manifest.json", ".bin"), end)
    world.restores(3)


@pytest.mark.parametrize("unreadable", ["ledger.json", MANIFEST, "process_00000_of_00004.json"])
def test_file_that_cannot_be_read_refuses_no_start(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    """The kernel answers EIO where a page of the file is damaged, as each later start would see."""
    tier = open_tier(ramdisk)
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    complete_save(tier, 1)
    (path,) = tier.path.rglob(unreadable)
    inode = path.stat().st_ino
    tier.close()

    class Unreadable(io.FileIO):
        def readall(self) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        def readinto(self, buffer: Any) -> int:
            if os.fstat(self.fileno()).st_ino == inode:
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(buffer)

    def opened(fd: int, mode: str) -> Any:
        return io.BufferedReader(Unreadable(fd)) if mode == "rb" else open(fd, mode)

    monkeypatch.setattr("emergency_ckpt.files.open", opened, raising=False)
    again = open_tier(ramdisk, start="another")
    assert [record.name for record in again.quarantined if "cannot be read" in record.problem]
