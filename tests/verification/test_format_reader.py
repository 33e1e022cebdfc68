"""A reader of FORMAT.md alone finds in every directory what the product finds there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forgery
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from damage import flip
from drains import Drains
from forgery import write_sealed
from format_reader import DirectoryFiles, Storage, allows, read_ramdisk, read_storage
from golden_example import ledger, slot_bytes
from looks import eckpt_here
from places import GOLDEN
from programs import printed_beside_bucket
from world import STORAGE, World, save_all

from emergency_ckpt.config import OrbaxFace
from emergency_ckpt.core.timeline import Ancestor, Timeline
from emergency_ckpt.storage import PersistentTier

BOTH: dict[str, Any] = {"save_every": 1, "local_save_every": 1}


def saves(world: World, *steps: int, start: int | None = None, **settings: Any) -> None:
    with world.open_both(**{**BOTH, **settings}) as ckpt:
        if start is not None:
            ckpt.restore(start, state=world.state(0), host_state={"at": 0})
        save_all(ckpt, world, *steps)


def plain_orbax(world: World, step: int) -> None:
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.arange(4) + step}))


def saved(world: World) -> None:
    saves(world, 1, 2, 3)


def saved_in_two_lives(world: World) -> None:
    saves(world, 1, 2)
    saves(world, 3, 4, start=2)


def removed(world: World) -> None:
    with world.open_both(**BOTH) as ckpt:
        save_all(ckpt, world, 1, 2, 3)
        ckpt.steps.remove(2)


def retained(world: World) -> None:
    saves(world, *range(1, 14), keep_last_n=2)


def rolled_back(world: World) -> None:
    saves(world, 2, 4, 6)
    saves(world, 3, start=2)


def rolled_back_before_a_save(world: World) -> None:
    saves(world, 2, 4, 6)
    saves(world, start=2)


def returned_to_a_hidden_step(world: World) -> None:
    saves(world, 2, 4)
    saves(world, 3, start=2)
    saves(world, start=4)


def saved_again(world: World) -> None:
    saves(world, 1, 2, 3)
    saves(world, 2, 3, start=1)


def saved_without_restore(world: World) -> None:
    saves(world, 1, 2, 9)
    saves(world, 3, 4)


def plain_orbax_beside(world: World) -> None:
    plain_orbax(world, 1)
    saves(world, 2, 3)
    plain_orbax(world, 4)
    saves(world, 5, start=3)
    plain_orbax(world, 6)


def copied_by_hand(world: World) -> None:
    saves(world, 1, 2)
    for folder in ("", "host_state/"):
        old = world.persistent / f"{folder}2"
        shutil.copytree(old, old.with_name("7"))
    shutil.copytree(world.persistent / "1", world.persistent / "8")


def log_lost(world: World) -> None:
    saves(world, 1, 2)
    shutil.rmtree(world.persistent / "host_state" / "log")


def newest_version_damaged(world: World) -> None:
    saves(world, 1, 2)
    (*_, newest) = sorted((world.persistent / "host_state" / "log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-9])


def killed_before_the_version(world: World) -> None:
    saves(world, 1, 2)
    (*_, newest) = sorted((world.persistent / "host_state" / "log").glob("*.json"))
    newest.unlink()


NAMED = "ckpt_00000"


def names_changed(world: World) -> None:
    saves(world, 1, 2)
    saves(world, 3, 4, start=2, orbax=OrbaxFace(step_name=NAMED))
    saves(world, 5, start=4, orbax=OrbaxFace(step_name="other_0"))


def names_changed_and_log_lost(world: World) -> None:
    saves(world, 1, 2)
    saves(world, 3, 4, start=2, orbax=OrbaxFace(step_name=NAMED))
    plain_orbax(world, 4)
    plain_orbax(world, 6)
    shutil.rmtree(world.persistent / "host_state" / "log")


def saved_again_under_another_name(world: World) -> None:
    saves(world, 1, 2, 3)
    saves(world, 2, 3, start=1, orbax=OrbaxFace(step_name=NAMED))
    saves(world, 3, 4, start=2)


DIRECTORIES: list[Callable[[World], None]] = [
    saved,
    saved_in_two_lives,
    removed,
    retained,
    rolled_back,
    rolled_back_before_a_save,
    returned_to_a_hidden_step,
    saved_again,
    saved_without_restore,
    plain_orbax_beside,
    copied_by_hand,
    log_lost,
    newest_version_damaged,
    killed_before_the_version,
    names_changed,
    names_changed_and_log_lost,
    saved_again_under_another_name,
]


def listed(world: World, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The steps of ``eckpt ls --json``, of both tiers."""
    words = ["ls", "--json", "--dir", str(world.persistent), "--local-dir", str(world.ramdisk)]
    capsys.readouterr()
    eckpt_here(*words)
    return json.loads(capsys.readouterr().out)["steps"]


def read(world: World) -> Storage:
    return read_storage(DirectoryFiles(world.persistent))


def counting(world: World) -> list[tuple[int, str]]:
    found = PersistentTier(str(world.persistent)).found
    return [(each.step, each.incarnation) for each in found.counting()]


def assert_agrees(world: World, capsys: pytest.CaptureFixture[str]) -> Storage:
    """The reader and the product find the same in both tiers."""
    found = read(world)
    assert found.refusal == ""
    assert [(each.step, each.incarnation) for each in found.counting] == counting(world)
    assert [fault for each in found.counting for fault in each.faults] == []
    steps = listed(world, capsys)
    in_storage = {s["step"] for s in steps if (s["tier"], s["state"]) == ("persistent", "whole")}
    assert {each.step for each in found.counting} == in_storage
    in_ram: set[tuple[int, str]] = set()
    for process in read_ramdisk(world.ramdisk, "run"):
        assert process.faults == []
        assert process.ledger is not None
        chain = process.ledger["chain"]
        in_ram |= {
            slot.save[:2]
            for slot in process.slots
            if allows(chain, slot.save.step, slot.save.incarnation)
            and all(shard.is_sound for shard in slot.shards)
        }
        for state in process.host_states:
            assert state.value == {"at": state.save.step}
    local = {
        (s["step"], s["incarnation"])
        for s in steps
        if (s["tier"], s["state"]) == ("local", "whole")
    }
    assert in_ram == local
    return found


@pytest.mark.parametrize("made", DIRECTORIES, ids=lambda made: made.__name__)
def test_reader_agrees_with_the_product(
    world: World,
    capsys: pytest.CaptureFixture[str],
    made: Callable[[World], None],
) -> None:
    made(world)
    found = assert_agrees(world, capsys)
    assert found.counting
    (newest,) = found.counting[-1:]
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.latest_step() == newest.step


def test_reader_agrees_with_the_product_in_a_bucket() -> None:
    found = printed_beside_bucket("format_program.py")
    steps = {name: [step for step, _ in each["product"]] for name, each in found.items()}
    assert steps == {
        "saved": [10, 20, 30],
        "removed": [10],
        "rolled_back": [10],
        "log_lost_after_rollback": [10],
        "saved_again_after_rollback": [10, 20],
        "killed_in_a_save_over_a_hidden_one": [10],
        "plain_orbax_beside": [10, 20],
        "adopted": [10, 20, 25],
    }
    for name, each in found.items():
        assert each["reader"] == each["product"], (name, each)
        assert each["refusal"] == ""
    states = found["rolled_back"]["states"]
    assert states == [[10, "complete", "10"], [20, "hidden", "20"]]


def test_reader_agrees_after_a_drain(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    drains = Drains(world, capsys)
    saves(world, 1, 2, save_every=2)
    saves(world, 3, start=2, save_every=0)
    code, drained = drains.drain()
    assert (code, drained["step"], drained["is_written"]) == (0, 3, True)
    assert [each.step for each in assert_agrees(world, capsys).counting] == [2, 3]


STORED: dict[str, str] = {
    "host_state/2/marker.json": "step 2: its marker is not that of its entry",
    "host_state/2/checksums.json": "step 2: its checksums.json is damaged",
    "host_state/2/process_00000_of_00001.json": "step 2: process_00000_of_00001.json: the digest",
    "2/_CHECKPOINT_METADATA": "step 2: its _CHECKPOINT_METADATA is damaged",
    "2/state/manifest.ocdbt": "step 2: its manifest.ocdbt is damaged",
    "2": "step 2: gone",
    "host_state/log/newest version": "version 3: ",
}


@pytest.mark.parametrize("name", STORED)
def test_damage_of_storage_is_named(world: World, name: str) -> None:
    saves(world, 1, 2)
    (*_, newest) = sorted((world.persistent / "host_state" / "log").glob("*.json"))
    if name.endswith("version"):
        assert int(newest.stem) == 3, "a claim and two steps"
        flip(newest)
    elif name == "2":
        shutil.rmtree(world.persistent / name)
    else:
        flip(world.persistent / name)
    found = read(world)
    assert len(found.faults) == 1
    assert found.faults[0].startswith(STORED[name])
    is_read = name.startswith("host_state/2/marker") or name in ("2", "2/_CHECKPOINT_METADATA")
    product = PersistentTier(str(world.persistent)).found.find(2)
    assert product is not None
    assert bool(product.step.problem) == is_read
    assert [each.step for each in found.counting] == ([1] if is_read else [1, 2])


FOREIGN = (b"", b"{}", b"null", b"\xff\xfe", b"[" * 2000, b'{"format":1}', b"x" * 5000, b"1e999")


@pytest.mark.dear
def test_foreign_bytes_in_any_file_are_named(world: World) -> None:
    saves(world, 1, 2)
    saves(world, 2, start=1)
    (process,) = read_ramdisk(world.ramdisk, "run")
    in_ram = [path for path in process.path.rglob("*.json") if path.parent.name != "quarantine"]
    (*_, newest) = sorted((world.persistent / "host_state" / "log").glob("*.json"))
    in_storage = [newest, *world.persistent.rglob("host_state/*/[mcp]*.json")]
    assert read(world).faults == process.faults == []
    for path in [*in_ram, *in_storage]:
        data = path.read_bytes()
        for foreign in FOREIGN:
            path.write_bytes(foreign)
            (process,) = read_ramdisk(world.ramdisk, "run")
            assert read(world).faults or process.faults, (path, foreign)
        path.write_bytes(data)


@pytest.mark.parametrize("number", [1, 3])
def test_other_format_of_the_log_is_refused(world: World, number: int) -> None:
    saves(world, 1, 2)
    (*_, newest) = sorted((world.persistent / "host_state" / "log").glob("*.json"))
    version = json.loads(newest.read_bytes())["version"]
    write_sealed(newest, "version", version, format=number)
    found = read(world)
    assert found.refusal == f"another version of this package wrote it: format {number}"
    assert found.counting == []


@pytest.mark.parametrize(
    "name", ["ledger.json", "slot_0.manifest.json", "slot_0.bin", "host_state/*-1/*.json"]
)
def test_damage_of_a_ramdisk_is_named(world: World, name: str) -> None:
    saves(world, 1, 2, save_every=0)
    (before,) = read_ramdisk(world.ramdisk, "run")
    assert before.faults == []
    (path,) = before.path.glob(name)
    flip(path, path.stat().st_size * 2 // 5 if path.suffix == ".json" else 0)
    (after,) = read_ramdisk(world.ramdisk, "run")
    (fault,) = after.faults
    assert fault.startswith(path.relative_to(before.path).as_posix())
    sound = [s.save.step for s in after.slots if all(shard.is_sound for shard in s.shards)]
    assert sorted(sound) == ([2] if "slot_0" in name else [1, 2])
    states = [state.save.step for state in after.host_states]
    assert states == ([2] if "host_state" in name else [1, 2])
    assert (after.ledger is None) == (name == "ledger.json")


def test_reader_reads_the_golden_files(tmp_path: Path) -> None:
    process = tmp_path / "demo" / "process_00003"
    saved = process / "host_state" / "000000000006-5e9d5e9d5e9d5e9d-40"
    saved.mkdir(parents=True)
    shutil.copy(GOLDEN / "manifest_v1.json", process / "slot_0.manifest.json")
    (process / "slot_0.bin").write_bytes(slot_bytes())
    shutil.copy(GOLDEN / "ledger_v1.json", process / "ledger.json")
    shutil.copy(GOLDEN / "process_00003_of_00008_v1.json", saved / "process_00003_of_00008.json")
    (found,) = read_ramdisk(tmp_path, "demo")
    assert found.faults == []
    assert found.complete == (45, ledger().incarnation, "demo")
    (slot,) = found.slots
    assert [(shard.path, shard.is_sound) for shard in slot.shards] == [
        ("params/b", True),
        ("params/w", True),
        ("rng", True),
    ]
    (state,) = found.host_states
    assert state.value == {
        "iterator": {"position": 160, "seen": b"\x00\xff", "window": (1, 2.5)},
        "best": float("-inf"),
        "seed": 1 << 70,
        1: "a key that is not a string",
        "table": ("<u2", (2,), b"\x01\x00\x02\x00"),
    }


def test_slot_may_lack_shards_without_elements(world: World) -> None:
    saves(world, 1, save_every=0)
    (path,) = world.ramdisk.glob("run/*/slot_*.manifest.json")
    manifest = forgery.read(path)
    contents = manifest["manifest"]["contents"]
    stored = [shard for shard in contents["shards"] if shard["nbytes"]]
    assert len(stored) == len(contents["shards"]) - 1
    contents["shards"] = stored
    forgery.write(path, forgery.resealed(manifest))
    (process,) = read_ramdisk(world.ramdisk, "run")
    assert process.faults == []
    (slot,) = process.slots
    lacking = {leaf["path"] for leaf in slot.leaves} - {shard.path for shard in slot.shards}
    assert lacking == {"empty"}
    world.restores(1, host=True)


LIVES = [f"{number:012d}-{nonce * 16}" for number in range(5) for nonce in "ab"]
CHAINS = [
    Timeline(LIVES[8], 7, (Ancestor(LIVES[6], 7), Ancestor(LIVES[2], 4)), 2),
    Timeline(LIVES[6], 7, (Ancestor(LIVES[5], 7),), -1),
    Timeline(LIVES[4], -1, (), -1),
    Timeline(LIVES[8], 3, (Ancestor("000000000002-orbax-5e9d", 3), Ancestor(LIVES[4], 1)), 1),
    Timeline(LIVES[8], 7, (Ancestor(LIVES[6], 7), Ancestor("000000000001-orbax-5e9d", 3)), 3),
]


@pytest.mark.parametrize("chain", CHAINS)
def test_rule_of_the_chain_is_that_of_the_product(chain: Timeline) -> None:
    record = msgspec.to_builtins(chain)
    plain = [f"{number:012d}-orbax-5e9d" for number in range(5)]
    for life in [*LIVES, *plain, f"{LIVES[6]}.000001", "no-number"]:
        for step in range(9):
            assert allows(record, step, life) == (not chain.rejection_reason(step, life)), (
                step,
                life,
            )
