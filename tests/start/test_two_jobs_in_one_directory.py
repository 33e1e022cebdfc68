"""Two jobs that save in one directory do not remove each other's steps: one of them is told."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orbax.checkpoint as ocp
import pytest
from persistent_steps import KEPT, LOG_FOLDER, complete_steps, life, writer_of
from places import JOBS
from programs import printed_beside_bucket, started
from world import STORAGE, World, save_all

from emergency_ckpt.core.limits import MAX_VERSION
from emergency_ckpt.core.step_log import Entry, LogWriter, Table, begun
from emergency_ckpt.errors import DirectoryInUse, SaveFailed
from emergency_ckpt.storage import PersistentTier, StepLog, StorageDirectory
from emergency_ckpt.tools.cli.main import main


def whole(world: World) -> list[int]:
    return complete_steps(str(world.persistent))


def version(number: int) -> str:
    return f"{number:012d}.json"


def contents(world: World) -> dict[str, bytes]:
    """What there is of the log."""
    return {path.name: path.read_bytes() for path in (world.persistent / LOG_FOLDER).iterdir()}


def log_of(world: World) -> StepLog:
    return PersistentTier(str(world.persistent)).found.log


def on_record(world: World) -> Table:
    table = log_of(world).read().table
    assert table is not None
    return table


def give_to(world: World, run_id: str) -> None:
    assert main(["doctor", "--adopt", "--dir", str(world.persistent), "--run-id", run_id]) == 0


def persist(world: World, *steps: int, **settings: Any) -> None:
    """A life that goes on from what there is."""
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        ckpt.restore(state=world.state(0))
        save_all(ckpt, world, *steps)


def saving_threads() -> list[str]:
    names = ("eckpt-local-saves", "eckpt-persistent-saves", "eckpt-preservation", "eckpt-overdue")
    return sorted(each.name for each in threading.enumerate() if each.name.startswith(names))


def test_second_run_in_a_directory_is_told_at_its_start(world: World) -> None:
    persist(world, 1, 2)
    before, threads = contents(world), saving_threads()
    with pytest.raises(DirectoryInUse, match=r"'run' saves there.*'other'.*eckpt doctor --adopt"):
        world.open_both(**STORAGE, run_id="other", keep_last_n=1)
    assert contents(world) == before
    assert saving_threads() == threads, "a supervisor may try again for hours"
    assert whole(world) == [1, 2]


def test_second_run_that_only_reads_a_directory_may(world: World) -> None:
    persist(world, 1, 2)
    with world.open_both(run_id="other", save_every=0) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2


def test_second_run_in_a_directory_without_steps_is_told(world: World) -> None:
    with (
        world.open_both(**STORAGE),
        pytest.raises(DirectoryInUse, match="'run' saves there"),
    ):
        world.open_both(**STORAGE, run_id="other", local_dir=f"{world.ramdisk}2")
    assert not whole(world)
    persist(world, 1)
    assert whole(world) == [1]


def test_two_starts_at_once_one_is_accepted(world: World) -> None:
    rounds = 8
    program = JOBS / "start_at_once_program.py"
    outcomes = []
    with contextlib.ExitStack() as stack:
        starts = [
            stack.enter_context(
                started(program, world.persistent, f"{world.ramdisk}{run}", f"run-{run}", rounds)
            )
            for run in range(2)
        ]
        for _ in range(rounds):
            assert {start.line() for start in starts} == {"ready"}
            for start in starts:
                start.say()
            outcomes.append(sorted(start.line() for start in starts))
            for start in starts:
                start.say()
        assert [start.wait() for start in starts] == [0, 0]
    assert outcomes == [["accepted", "told"]] * rounds


@pytest.mark.parametrize("moved", [False, True])
def test_restart_with_default_names_is_never_refused(world: World, moved: bool) -> None:
    """With other RAM, in another life, before and after a first save, in a directory moved."""
    settings = {**STORAGE, "run_id": None}
    for number in range(3):
        with world.open_both(**settings, local_dir=f"{world.ramdisk}{number}") as ckpt:
            step, _ = ckpt.restore(state=world.state(0))
            assert step == (number - 1 or None if number else None)
            if number:
                save_all(ckpt, world, number)
    if moved:
        world.persistent.rename(world.persistent.with_name("moved"))
        world.persistent = world.persistent.with_name("moved")
    with world.open_both(**settings) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
    assert whole(world) == [1, 2, 3]


@pytest.mark.parametrize("number", [1, 2])
def test_job_that_lost_its_directory_stays_out(world: World, number: int) -> None:
    """Else two jobs of one run would take turns: also two with one number, of equal right."""
    with world.open_both(**STORAGE) as older:
        save_all(older, world, 1)
        there = log_of(world).read()
        assert on_record(world).incarnation[:12] == "000000000001"
        table = begun(there.table, LogWriter("run", False, life(number, "f")))
        assert log_of(world).append(table)
        older.save(step=2, state=world.state(2))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="another job with this run's name"):
            older.check_for_errors()
    assert whole(world) == [1]
    assert on_record(world) == table


def test_refusal_at_a_rollback_is_named_as_what_it_is(world: World) -> None:
    with world.open_both(local_save_every=1, local_keep_last_n=2, save_every=4) as older:
        save_all(older, world, 1, 2, 3, 4)
        give_to(world, "other")
        persist(world, 6, run_id="other", local_dir=f"{world.ramdisk}2")
        world.events.clear()
        assert older.restore(3, state=world.state(0))[0] == 3
        save_all(older, world, 5)
    assert world.named("persistent.problem", cause="in_use")
    assert not world.named("persistent.problem", cause="unreachable")
    assert whole(world) == [4, 6]


def test_append_beside_another_of_its_number_writes_nothing(world: World) -> None:
    log = log_of(world)
    first, second = (begun(None, LogWriter(run, False, life(1))) for run in ("first", "second"))
    assert log.append(first)
    assert log.append(second) is None
    assert log.append(first), "the answer was lost"
    assert on_record(world) == first
    assert len(world.versions()) == 1


@pytest.mark.parametrize("behind", [1, 3, KEPT + 3])
def test_restart_beside_an_old_listing_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """A file server may show a folder as it was half a minute ago."""
    with world.open_both(**STORAGE):
        pass
    names_in = StorageDirectory.names_in
    old = set(contents(world))
    assert old == {version(1), "newest"}
    persist(world, *range(1, behind + 1))

    def old_names_in(
        self: StorageDirectory, below: str = "", deadline_s: float | None = None
    ) -> set[str]:
        return old if below == LOG_FOLDER else names_in(self, below, deadline_s)

    monkeypatch.setattr(StorageDirectory, "names_in", old_names_in)
    newest = int(world.versions()[-1].stem)
    persist(world, behind + 1)
    assert int(world.versions()[-1].stem) > newest
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    assert whole(world) == list(range(1, behind + 2))


@pytest.mark.parametrize("data", [b"", b"junk", b"0", b"1", b"999999999999", b"9" * 99, None])
def test_restart_beside_any_hint_of_the_newest_goes_on(world: World, data: bytes | None) -> None:
    """As of a copy that was made while a job saved there."""
    persist(world, 1, 2)
    hint = world.persistent / LOG_FOLDER / "newest"
    hint.unlink()
    if data is not None:
        hint.write_bytes(data)
    persist(world, 3)
    assert whole(world) == [1, 2, 3]
    assert hint.read_bytes() == str(int(world.versions()[-1].stem)).encode()


NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_restart_beside_a_hint_that_is_no_file_goes_on(world: World, kind: str) -> None:
    """The versions are listed, and found by name: the hint is not needed."""
    persist(world, 1, 2)
    hint = world.persistent / LOG_FOLDER / "newest"
    hint.unlink()
    NO_FILES[kind](hint)
    persist(world, 3)
    assert whole(world) == [1, 2, 3]


def test_two_jobs_of_one_run_the_older_is_told(world: World) -> None:
    older = world.open_both(**STORAGE, keep_last_n=1)
    newer = world.open_both(**STORAGE, local_dir=f"{world.ramdisk}2")
    with older, newer:
        save_all(older, world, 1)
        save_all(newer, world, 2, 3)
        older.save(step=3, state=world.state(3))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="another job with this run's name"):
            older.check_for_errors()
        with pytest.raises(DirectoryInUse, match="another job with this run's name"):
            older.steps.remove(2)
    assert whole(world) == [1, 2, 3]


@pytest.mark.dear
@pytest.mark.parametrize("saves", [1, KEPT, 3 * KEPT])
def test_older_life_that_wakes_up_after_saves_is_told(world: World, saves: int) -> None:
    """Also when the version after the one that it has read is long removed."""
    newer = range(2, 2 + saves)
    with world.open_both(**STORAGE) as older:
        save_all(older, world, 1)
        persist(world, *newer, local_dir=f"{world.ramdisk}2")
        before = contents(world)
        older.save(step=2, state=world.state(100))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="another job with this run's name"):
            older.check_for_errors()
        with pytest.raises(DirectoryInUse, match="another job with this run's name"):
            older.steps.remove(newer[-1])
    assert contents(world) == before
    assert whole(world) == [1, *newer]


def test_restart_after_any_number_of_lives_goes_on(world: World) -> None:
    writer_of(PersistentTier(str(world.persistent))).hold(life(10**11))
    persist(world, 1)
    assert on_record(world).incarnation[:12] == f"{10**11 + 1:012d}"
    assert whole(world) == [1]


def test_directory_of_plain_orbax_is_taken_by_the_first_run(world: World) -> None:
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": world.state(1)["w"]}))
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2)
    assert on_record(world).run_id == "run"
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")


DAMAGED = [b"", b"{", b"x" * 9000]


@pytest.mark.parametrize("data", DAMAGED)
@pytest.mark.parametrize("which", ["newest", "all"])
def test_damaged_version_stops_no_restart_of_its_run(world: World, data: bytes, which: str) -> None:
    """And no other run begins, whatever is left of the log: the steps have their run's name."""
    persist(world, 1)
    for path in world.versions()[-1 if which == "newest" else 0 :]:
        path.write_bytes(data)
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    assert world.named("persistent.problem", cause="log_damaged")
    persist(world, 2)
    assert whole(world) == [1, 2]
    assert on_record(world).run_id == "run"
    assert log_of(world).read().faults == (), "it is mended"


def test_damaged_log_without_steps_is_anybodys(world: World) -> None:
    with world.open_both(**STORAGE):
        pass
    (path,) = world.versions()
    path.write_bytes(b"{")
    persist(world, 1, run_id="other")
    assert on_record(world).run_id == "other"


def test_version_torn_by_a_crash_leaves_the_one_before(world: World) -> None:
    """As on a file system without hard links."""
    persist(world, 1)
    newest = world.versions()[-1]
    torn = newest.with_name(version(int(newest.stem) + 1))
    torn.write_bytes(newest.read_bytes()[:40])
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    persist(world, 2)
    assert torn.read_bytes() == newest.read_bytes()[:40], "no version is written twice"
    assert world.versions()[-1] > torn
    assert whole(world) == [1, 2]


@pytest.mark.parametrize("links", [True, False])
def test_version_is_synced_with_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Else a loss of power takes back a version that others have read."""
    persist(world, 1)
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    files, names, fsync = dict[int, bytes](), set[str](), os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        status, path = os.fstat(fd), Path(f"/proc/self/fd/{fd}")
        if stat.S_ISDIR(status.st_mode):
            names.update(os.listdir(fd))
        else:
            files[status.st_ino] = path.read_bytes()

    monkeypatch.setattr(os, "fsync", note)
    before = contents(world)
    table = on_record(world)
    assert log_of(world).append(msgspec.structs.replace(table, number=table.number + 1))
    newest = world.versions()[-1]
    assert files[newest.stat().st_ino] == newest.read_bytes()
    assert newest.name in names
    assert set(contents(world)) == {*before, newest.name}
    assert log_of(world).append(msgspec.structs.replace(table, greatest=99)) is None
    assert on_record(world).number == table.number + 1


def refuse_links(source: Any, path: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), source, None, path)


def test_names_beside_the_versions_say_nothing(world: World) -> None:
    persist(world, 1)
    folder = world.persistent / LOG_FOLDER
    for name in ("9.json", f"{version(9)}.{life(1)}.tmp", "9999999999999.json", "x", version(0)):
        (folder / name).write_bytes(b"junk")
    persist(world, 2)
    assert whole(world) == [1, 2]
    assert log_of(world).read().faults == ()


def test_folder_in_the_place_of_a_version_stops_no_restart(world: World) -> None:
    persist(world, 1)
    newest = world.versions()[-1]
    newest.with_name(version(int(newest.stem) + 1)).mkdir()
    persist(world, 2)
    assert whole(world) == [1, 2]


def test_version_of_the_last_number_says_how_to_mend_it(world: World) -> None:
    persist(world, 1)
    last = msgspec.structs.replace(on_record(world), number=MAX_VERSION)
    path = world.persistent / LOG_FOLDER / version(MAX_VERSION)
    assert log_of(world).append(last)
    (path.parent / "newest").unlink()
    with world.open_both(**STORAGE) as ckpt:
        ckpt.save(step=2, state=world.state(2))
        ckpt.wait_until_finished()
        with pytest.raises(SaveFailed, match=r"log/999999999999\.json.*remove it"):
            ckpt.check_for_errors()
    path.unlink()
    persist(world, 2)
    assert whole(world) == [1, 2]


def test_directory_that_is_given_to_a_run_is_the_others_no_more(world: World) -> None:
    older = world.open_both(**STORAGE)
    with older:
        save_all(older, world, 1)
        give_to(world, "other")
        persist(world, 2, run_id="other", local_dir=f"{world.ramdisk}2")
        older.save(step=3, state=world.state(3))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="'other' saves there"):
            older.check_for_errors()
    persist(world, 3, run_id="other")
    assert whole(world) == [1, 2, 3]


def claimed(world: World) -> Table:
    """Version 1."""
    table = begun(None, LogWriter("run", True, life(1)))
    table = msgspec.structs.replace(table, steps=(Entry(1, life(1), metrics={"a": 0.5}),))
    assert log_of(world).append(table)
    return table


@pytest.mark.dear
def test_version_with_any_flipped_byte_is_passed_over(world: World) -> None:
    table = claimed(world)
    (path,) = world.versions()
    data = path.read_bytes()
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1
        path.write_bytes(damaged)
        read = log_of(world).read()
        assert (read.table, len(read.faults)) == (None, 1)
    path.write_bytes(data)
    assert on_record(world) == table


def test_two_runs_that_claim_a_bucket_at_once_one_is_told() -> None:
    seen = printed_beside_bucket("claim_program.py")
    assert sorted(seen["told"].values()) == [False] * 1 + [True] * 7
    assert not seen["told"][seen["holder"]]
    assert seen["restarted"] == life(2)
    assert seen["older_told"]
    assert seen["twin_told"]


def test_version_of_one_life_keeps_the_first_writers_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life's start writes in the name of a life that has hung, and goes on meanwhile."""
    persist(world, 1)
    log = log_of(world)
    table = on_record(world)
    mine = msgspec.structs.replace(table, number=table.number + 1, greatest=table.greatest + 1)
    theirs = msgspec.structs.replace(mine, greatest=mine.greatest + 1)
    real, others = os.link, list[Any]()

    def link(*args: Any) -> None:
        real(*args)
        monkeypatch.setattr(os, "link", real)
        others.append(log.append(theirs))

    monkeypatch.setattr(os, "link", link)
    written = log.append(mine)
    assert written is not None
    assert others == [None]
    assert on_record(world) == mine
