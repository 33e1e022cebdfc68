"""Two jobs that save in one directory do not remove each other's steps: one of them is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from places import JOBS
from world import World, save_all

from emergency_ckpt.core.run_claim import RunRecord
from emergency_ckpt.errors import CorruptData, DirectoryInUse, SaveFailed
from emergency_ckpt.testing.gcs import FakeGcs
from emergency_ckpt.tiers.persistent.run_record import (
    RUN_FOLDER,
    Found,
    RunFile,
    decode_run,
    encode_run,
)
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.tiers.storage.directory import StorageDirectory

STORAGE: dict[str, Any] = {"save_every_n_steps": 1, "local_save_every_n_steps": 0}
PROGRAM = JOBS / "claim_program.py"


def whole(world: World) -> list[int]:
    return PersistentTier(str(world.persistent)).whole_steps()


def record(world: World) -> Path:
    """The one file."""
    (path,) = (world.persistent / "host_state" / "run").iterdir()
    return path


def persist(world: World, *steps: int, **settings: Any) -> None:
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        save_all(ckpt, world, *steps)


def test_second_run_in_a_directory_is_told_at_its_start(world: World) -> None:
    persist(world, 1, 2)
    before = record(world).read_bytes()
    with pytest.raises(DirectoryInUse, match=r"'run' saves there.*'other'.*take_over_dir"):
        world.open_both(**STORAGE, run_id="other", keep_last_n=1)
    assert record(world).read_bytes() == before
    assert whole(world) == [1, 2]


def test_second_run_that_only_reads_a_directory_may(world: World) -> None:
    persist(world, 1, 2)
    with world.open_both(run_id="other", save_every_n_steps=0) as ckpt:
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
    starts = [
        subprocess.Popen(
            [
                sys.executable,
                PROGRAM.with_name("start_at_once_program.py"),
                world.persistent,
                f"{world.ramdisk}{run}",
                f"run-{run}",
                str(rounds),
            ],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for run in range(2)
    ]
    outcomes = []
    for _ in range(rounds):
        assert {line_of(start) for start in starts} == {"ready"}
        for start in starts:
            tell(start)
        outcomes.append(sorted(line_of(start) for start in starts))
        for start in starts:
            tell(start)
    assert [start.wait() for start in starts] == [0, 0]
    assert outcomes == [["accepted", "told"]] * rounds


def line_of(start: subprocess.Popen[str]) -> str:
    assert start.stdout is not None
    return start.stdout.readline().strip()


def tell(start: subprocess.Popen[str]) -> None:
    assert start.stdin is not None
    start.stdin.write("\n")
    start.stdin.flush()


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


def test_job_without_its_directory_stays_out_whatever_its_clock(world: World) -> None:
    """Else two jobs of one run, one with a clock ahead, would take turns."""
    with world.open_both(**STORAGE) as older:
        save_all(older, world, 1)
        storage = PersistentTier(str(world.persistent)).storage
        RunFile(storage).replace(RunFile(storage).read(), RunRecord("run", False, "000000000001-a"))
        older.save(step=2, state=world.state(2))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="another job with this run's name"):
            older.check_for_errors()
    assert whole(world) == [1]


def test_refusal_at_a_rollback_is_named_as_what_it_is(world: World) -> None:
    with world.open_both(**STORAGE) as older:
        save_all(older, world, 1, 2)
        persist(world, 3, run_id="other", take_over_dir=True, local_dir=f"{world.ramdisk}2")
        world.events.clear()
        assert older.restore(1, state=world.state(0))[0] == 1
    assert "persistent.in_use" in world.names()
    assert "persistent.unreachable" not in world.names()
    assert whole(world) == [1, 2, 3]


def test_replace_of_a_record_that_changed_since_writes_nothing(world: World) -> None:
    file = RunFile(PersistentTier(str(world.persistent)).storage)
    seen = file.read()
    first, second = RunRecord("first", False, "0001-a"), RunRecord("second", False, "0002-b")
    file.replace(seen, first)
    file.replace(seen, second)
    assert file.read().record == first
    assert file.read().older == ()


def test_restart_beside_an_old_listing_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server may show a folder as it was half a minute ago."""
    persist(world, 1)
    names_in = StorageDirectory.names_in
    old = {record(world).name}

    def old_names_in(
        self: StorageDirectory, below: str = "", deadline_s: float | None = None
    ) -> set[str]:
        return old if below == RUN_FOLDER else names_in(self, below, deadline_s)

    monkeypatch.setattr(StorageDirectory, "names_in", old_names_in)
    persist(world, 2)
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    assert whole(world) == [1, 2]
    assert record(world).name == "000000000002.json"


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


def test_restart_of_the_same_run_goes_on(world: World) -> None:
    persist(world, 1)
    persist(world, 2)
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
        assert ckpt.restore(1, state=world.state(0))[0] == 1
        save_all(ckpt, world, 2)
    assert whole(world) == [1, 2]


def test_restart_on_a_host_whose_clock_lags_goes_on(world: World) -> None:
    storage = PersistentTier(str(world.persistent)).storage
    RunFile(storage).replace(Found(), RunRecord("run", False, "fffffffffff0-00"))
    persist(world, 1)
    assert whole(world) == [1]


def test_directory_of_plain_orbax_is_taken_by_the_first_run(world: World) -> None:
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": world.state(1)["w"]}))
    persist(world, 2)
    assert decode_run(record(world).read_bytes(), "run").run_id == "run"
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")


@pytest.mark.parametrize("data", [b"", b"{", b"x" * 9000])
def test_damaged_record_stops_no_restart_of_its_run(world: World, data: bytes) -> None:
    persist(world, 1)
    record(world).write_bytes(data)
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    persist(world, 2)
    assert whole(world) == [1, 2]
    assert decode_run(record(world).read_bytes(), "run").run_id == "run"


def test_damaged_record_without_steps_is_anybodys(world: World) -> None:
    with world.open_both(**STORAGE):
        pass
    record(world).write_bytes(b"{")
    persist(world, 1, run_id="other")
    assert decode_run(record(world).read_bytes(), "run").run_id == "other"


def test_record_torn_by_a_crash_leaves_the_one_before(world: World) -> None:
    persist(world, 1)
    (record(world).parent / "000000000009.json").write_bytes(record(world).read_bytes()[:40])
    with pytest.raises(DirectoryInUse, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")
    persist(world, 2)
    assert record(world).name == "000000000010.json"
    assert whole(world) == [1, 2]


def test_names_beside_the_record_say_nothing(world: World) -> None:
    persist(world, 1)
    folder = record(world).parent
    for name in ("9.json", "000000000009.json.0001-a.tmp", "9999999999999.json", "x"):
        (folder / name).write_bytes(b"junk")
    persist(world, 2)
    assert whole(world) == [1, 2]


def test_folder_in_the_place_of_the_record_stops_no_restart(world: World) -> None:
    persist(world, 1)
    record(world).with_name("000000000002.json").mkdir()
    persist(world, 2)
    assert whole(world) == [1, 2]


def test_record_of_the_last_number_says_how_to_mend_it(world: World) -> None:
    persist(world, 1)
    record(world).rename(record(world).with_name("999999999999.json"))
    with world.open_both(**STORAGE) as ckpt:
        ckpt.save(step=2, state=world.state(2))
        ckpt.wait_until_finished()
        with pytest.raises(SaveFailed, match=r"run/999999999999\.json.*remove it"):
            ckpt.check_for_errors()
    record(world).unlink()
    persist(world, 2)
    assert whole(world) == [1, 2]


def test_take_over_dir_puts_this_run_in_the_others_place(world: World) -> None:
    older = world.open_both(**STORAGE)
    with older:
        save_all(older, world, 1)
        persist(world, 2, run_id="other", take_over_dir=True, local_dir=f"{world.ramdisk}2")
        older.save(step=3, state=world.state(3))
        older.wait_until_finished()
        with pytest.raises(SaveFailed, match="'other' saves there"):
            older.check_for_errors()
    persist(world, 3, run_id="other")
    assert whole(world) == [1, 2, 3]


@pytest.mark.parametrize("data", [b"", b"[]", b"{" * 9000, b"x" * 5000, b'{"format":2}'])
def test_decode_run_of_hostile_bytes_is_corrupt_data(data: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_run(data, "run.json")


def test_decode_run_of_any_flipped_byte_is_corrupt_data() -> None:
    encoded = encode_run(RunRecord("run", True, "0001-a"))
    assert decode_run(encoded, "run.json") == RunRecord("run", True, "0001-a")
    for index in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[index] ^= 1
        with pytest.raises(CorruptData):
            decode_run(bytes(damaged), "run.json")


@pytest.mark.parametrize("record", [RunRecord("a/b", False, "1"), RunRecord("run", False, "")])
def test_decode_run_of_names_that_are_none_is_corrupt_data(record: RunRecord) -> None:
    with pytest.raises(CorruptData):
        decode_run(encode_run(record), "run.json")


def test_two_runs_that_claim_a_bucket_at_once_one_is_told() -> None:
    with FakeGcs(buckets=["bucket"], process=True) as gcs:
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        out = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environ, stdout=subprocess.PIPE, check=True
        ).stdout
    seen = json.loads(out.splitlines()[-1])
    assert sorted(seen["told"].values()) == [False] * 1 + [True] * 7
    assert not seen["told"][seen["holder"]]
    assert seen["restarted"] == "0002-b"
    assert seen["older_told"]
