"""Somebody writes into the ramdisk of a job that has a secret: the job's own newest step holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from forgery import canonical, inner, make_up_step, resealed, step_of, write, write_inside
from world import OTHER_SECRET, SECRET, World, logged, same, save_all

from emergency_ckpt.core.limits import MAX_INCARNATION_NUMBER
from emergency_ckpt.errors import RestoreFailed, Unrecoverable


@pytest.fixture
def job(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose runs are given a secret, with steps 2 and 4 in RAM."""
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with world.open(local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 2, 4)
    return world


def directory(world: World) -> Path:
    return world.ramdisk / "run" / "process_00000"


def restored(world: World, **settings: Any) -> tuple[int | None, Any]:
    with world.open(local_keep_last_n=2, **settings) as ckpt:
        return ckpt.restore(state=world.state(0), host_state={"at": 0})


def test_made_up_step_in_the_ramdisk_does_not_win(job: World) -> None:
    make_up_step(directory(job), 1_000_000)
    with logged() as lines:
        step, state = restored(job)
    assert step == 4
    assert same(state, job.state(4))
    assert [line for line in lines if "it is not signed" in line]
    (rejected,) = [e.fields for e in job.events if e.name == "restore.rejected"]
    assert rejected["step"] == 1_000_000


def test_made_up_step_without_a_secret_wins(job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So give one where others can write to the ramdisk."""
    make_up_step(directory(job), 1_000_000)
    monkeypatch.delenv("ECKPT_SECRET")
    assert restored(job)[0] == 1_000_000


def test_altered_manifest_costs_that_step_alone(job: World) -> None:
    manifests = directory(job).glob("slot_?.manifest.json")
    (manifest,) = [path for path in manifests if step_of(path) == 4]
    file = inner(manifest)
    for shard in file["manifest"]["contents"]["shards"]:
        shard["crc32c"] = 0
    write_inside(manifest, resealed(file))
    with logged() as lines:
        assert restored(job)[0] == 2
    assert [line for line in lines if "the file was changed" in line]


def test_changed_secret_is_no_fresh_start_and_costs_nothing(
    job: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECKPT_SECRET", OTHER_SECRET)
    with logged() as lines, pytest.raises(Unrecoverable, match=r"step 4.*knew it to be complete"):
        restored(job)
    assert [line for line in lines if "it was signed with another secret" in line]
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    assert restored(job)[0] == 4


def test_changed_secret_with_the_step_in_storage_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with world.open_both() as ckpt:
        save_all(ckpt, world, 2)
    monkeypatch.setenv("ECKPT_SECRET", OTHER_SECRET)
    with world.open_both() as ckpt:
        assert ckpt.restore(state=world.state(0), host_state={"at": 0})[0] == 2
        save_all(ckpt, world, 3)
    with world.open_both() as ckpt:
        assert ckpt.restore(state=world.state(0), host_state={"at": 0})[0] == 3


def test_steps_of_a_life_without_a_secret_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a version that did not sign. One start without the secret takes them."""
    monkeypatch.delenv("ECKPT_SECRET", raising=False)
    with world.open() as ckpt:
        save_all(ckpt, world, 2)
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with pytest.raises(Unrecoverable, match="step 2"):
        restored(world)
    monkeypatch.delenv("ECKPT_SECRET")
    assert restored(world)[0] == 2


def name_the_last_life(world: World) -> None:
    """Write a ledger, and a manifest and host states, of a life after which there is no other."""
    make_up_step(directory(world), 9)
    last = f"{MAX_INCARNATION_NUMBER}-5e5e5e5e5e5e5e5e"
    for manifest in directory(world).glob("slot_?.manifest.json"):
        if step_of(manifest) == 9:
            file = inner(manifest)
            file["manifest"]["contents"]["save"]["incarnation"] = last
            write(manifest, resealed(file))
    complete = {"step": 9, "incarnation": last, "run_id": "run"}
    ledger = {"incarnation": last, "chain": None, "complete": complete}
    digest = hashlib.sha256(canonical(ledger)).hexdigest()
    write(directory(world) / "ledger.json", {"format": 1, "digest": digest, "ledger": ledger})


def test_last_number_of_a_life_by_a_stranger_is_not_used(job: World) -> None:
    name_the_last_life(job)
    assert restored(job)[0] == 4
    with job.open(local_keep_last_n=2) as ckpt:
        assert ckpt.restore(state=job.state(0))[0] == 4
        save_all(ckpt, job, 5)
    assert restored(job)[0] == 5


def test_last_number_of_a_life_without_a_secret_is_named(
    job: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_the_last_life(job)
    monkeypatch.delenv("ECKPT_SECRET")
    with pytest.raises(RestoreFailed, match=r"there is no greater number.*eckpt ls"):
        restored(job)
