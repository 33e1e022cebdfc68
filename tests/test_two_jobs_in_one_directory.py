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
from checkpointer_support import World, save_all

from emergency_ckpt.core.run_claim import RunRecord
from emergency_ckpt.errors import CorruptData, PersistentTierError, SaveFailed
from emergency_ckpt.testing.gcs import FakeGcs
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.run_record import RunFile, decode_run, encode_run

STORAGE: dict[str, Any] = {"save_every_n_steps": 1, "local_save_every_n_steps": 0}
PROGRAM = Path(__file__).with_name("claim_program.py")


def whole(world: World) -> list[int]:
    return PersistentTier(str(world.persistent)).whole_steps()


def record(world: World) -> Path:
    return world.persistent / "host_state" / "run.json"


def persist(world: World, *steps: int, **settings: Any) -> None:
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        save_all(ckpt, world, *steps)


def test_second_run_in_a_directory_is_told_at_its_start(world: World) -> None:
    persist(world, 1, 2)
    before = record(world).read_bytes()
    with pytest.raises(PersistentTierError, match=r"'run' saves there.*'other'.*take_over_dir"):
        world.open_both(**STORAGE, run_id="other", keep_last_n=1)
    assert record(world).read_bytes() == before
    assert whole(world) == [1, 2]


def test_second_run_that_only_reads_a_directory_may(world: World) -> None:
    persist(world, 1, 2)
    with world.open_both(run_id="other", save_every_n_steps=0) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2


def test_two_runs_from_nothing_the_later_saver_is_told(world: World) -> None:
    first = world.open_both(**STORAGE)
    second = world.open_both(
        **STORAGE, run_id="other", keep_last_n=1, local_dir=f"{world.ramdisk}2"
    )
    with first, second:
        save_all(first, world, 1, 2)
        second.save(step=2, state=world.state(2))
        second.wait_until_finished()
        with pytest.raises(SaveFailed, match="'run' saves there"):
            second.check_for_errors()
        save_all(first, world, 3)
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
        with pytest.raises(PersistentTierError, match="another job with this run's name"):
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
    assert RunFile(storage).create(RunRecord("run", False, "fffffffffff0-00"))
    persist(world, 1)
    assert whole(world) == [1]


def test_directory_of_plain_orbax_is_taken_by_the_first_run(world: World) -> None:
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": world.state(1)["w"]}))
    persist(world, 2)
    assert decode_run(record(world).read_bytes(), "run").run_id == "run"
    with pytest.raises(PersistentTierError, match="'run' saves there"):
        world.open_both(**STORAGE, run_id="other")


def test_damaged_record_lets_nobody_save_until_it_is_removed(world: World) -> None:
    persist(world, 1)
    record(world).write_bytes(b"{")
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 1
        ckpt.save(step=2, state=world.state(2))
        ckpt.wait_until_finished()
        with pytest.raises((SaveFailed, CorruptData), match=r"run\.json"):
            ckpt.check_for_errors()
    assert whole(world) == [1]
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
