"""One bit of a small file, or its end: named, never a fresh start, never another exception."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import damaged, flip
from forgery import write_sealed
from persistent_steps import complete_steps
from places import GOLDEN
from world import World, persist, save_all

from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    DirectoryInUse,
    OtherFormat,
    Unrecoverable,
)
from emergency_ckpt.ram.manifest import decode_manifest
from emergency_ckpt.ram.process_files import ProcessFiles
from emergency_ckpt.state import host_state
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage import directory as storage_directory
from emergency_ckpt.storage import log as log_module
from emergency_ckpt.storage.log import decode_version
from emergency_ckpt.storage.marker import check_marker, decode_checksums


def marker_of(world: World, step: int) -> Path:
    return world.persistent / "host_state" / str(step) / "marker.json"


def log_of(world: World) -> Path:
    return world.persistent / "host_state" / "log"


def test_decode_marker_refuses_every_damaged_file(world: World) -> None:
    persist(world, 2)
    data = marker_of(world, 2).read_bytes()
    marker = check_marker(data, 2, "marker")
    for each in damaged(data):
        with pytest.raises(CorruptData):
            check_marker(each, 2, "marker")
    checksums = marker_of(world, 2).with_name("checksums.json").read_bytes()
    for each in damaged(checksums):
        with pytest.raises(CorruptData):
            decode_checksums(each, marker, "checksums")


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("marker_v1.json", lambda data: check_marker(data, 40, "marker")),
        ("log_version_v2.json", lambda data: decode_version(data, 14, "log")),
        ("manifest_v1.json", decode_manifest),
        ("process_00003_of_00008_v1.json", host_state.decode),
    ],
)
def test_decoders_of_damaged_golden_files_raise_corrupt_data(
    name: str, decode: Callable[[bytes], object]
) -> None:
    data = (GOLDEN / name).read_bytes()
    decode(data)
    refused, cases = 0, list(damaged(data))
    for each in cases:
        try:
            decode(each)
        except CorruptData:
            refused += 1
    assert refused == len(cases) if decode is decode_manifest else refused > len(data)


def test_golden_log_of_the_format_before_is_refused_by_name() -> None:
    data = (GOLDEN / "log_version_v1.json").read_bytes()
    with pytest.raises(OtherFormat, match="an older version of this package"):
        decode_version(data, 14, "log")


def test_no_wrong_bit_looks_like_a_later_format() -> None:
    data = (GOLDEN / "log_version_v2.json").read_bytes()
    for each in damaged(data):
        with pytest.raises(CorruptData) as caught:
            decode_version(each, 14, "log")
        assert caught.type is CorruptData, each


@pytest.mark.parametrize(
    "fields",
    [{"state": "gone"}, {"path": "../outside/4"}],
    ids=["state unknown", "field unknown"],
)
def test_decode_version_of_a_strange_entry_raises_corrupt_data(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    version = json.loads((GOLDEN / "log_version_v2.json").read_bytes())["version"]
    path = tmp_path / "log"
    write_sealed(path, "version", version)
    decode_version(path.read_bytes(), 14, "log")
    version["steps"][-1].update(fields)
    write_sealed(path, "version", version)
    with pytest.raises(CorruptData):
        decode_version(path.read_bytes(), 14, "log")


@pytest.mark.parametrize("third", range(3))
def test_ledger_of_damaged_file_raises_corrupt_data(tmp_path: Path, third: int) -> None:
    data = (GOLDEN / "ledger_v1.json").read_bytes()
    path = tmp_path / "ledger.json"
    path.write_bytes(data)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        ledger = ProcessFiles(fd, "demo").ledger()
        for each in itertools.islice(damaged(path.read_bytes()), third, None, 3):
            path.write_bytes(each)
            try:
                assert ProcessFiles(fd, "demo").ledger() == ledger
            except CorruptData:
                continue
    finally:
        os.close(fd)


def test_describe_of_damaged_orbax_file_raises_a_typed_error(world: World) -> None:
    """Or says what it said: not every bit of them matters."""
    persist(world, 2)
    tier, chance = PersistentTier(str(world.persistent), timeout_s=2.0), random.Random(0)
    whole = tier.describe(tier.find(2))
    small = [p for p in sorted((world.persistent / "2").rglob("*")) if p.is_file()]
    for path in small:
        data = path.read_bytes()
        for each in chance.sample(list(damaged(data)), 1):
            path.write_bytes(each)
            try:
                assert tier.describe(tier.find(2)).leaves.keys() == whole.leaves.keys()
            except CheckpointError:
                continue
            finally:
                path.write_bytes(data)


@pytest.mark.parametrize("damage", [b"", b"\xff", b"{"], ids=["empty", "no text", "truncated"])
def test_restore_of_the_only_step_unreadable_is_no_fresh_start(world: World, damage: bytes) -> None:
    persist(world, 2)
    marker_of(world, 2).write_bytes(damage)
    with (
        world.open_both(keep_last_n=1) as ckpt,
        pytest.raises(Unrecoverable, match=r"host_state/2/marker\.json cannot be used \(.*remove"),
    ):
        ckpt.restore(state=world.state(0))
    assert (world.persistent / "2" / "state").exists()
    (rejected,) = [e.fields for e in world.events if e.name == "restore.rejected"]
    assert (rejected["step"], rejected["tier"]) == (2, "persistent")


IN_EACH_STEP = ("*/state/d/*", "*/_CHECKPOINT_METADATA", "host_state/*/checksums.json",
                "host_state/*/marker.json", "host_state/*/process_*.json")  # fmt: skip
IN_RAM = ("slot_*.bin", "slot_*.manifest.json", "host_state/*/process_*.json")


def spoil(root: Path, pattern: str) -> None:
    """Turn over a bit of the first byte of each file, of which every reader needs that byte."""
    paths = [path for path in root.glob(pattern) if path.is_file()]
    assert paths, pattern
    for path in paths:
        flip(path, 0)


def contents_of(root: Path) -> dict[Path, bytes]:
    """What steps consist of: a start may write a version of the log and its ledger."""
    files = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "log"]
    return {p: p.read_bytes() for p in files if p.suffix != ".lock" and p.name != "ledger.json"}


@pytest.mark.dear
@pytest.mark.parametrize("in_ram", IN_RAM)
@pytest.mark.parametrize("stored", [*IN_EACH_STEP, "**/*"])
def test_steps_damaged_in_every_copy_are_no_fresh_start(
    world: World, stored: str, in_ram: str
) -> None:
    """Of all steps in both tiers; once with all other files of storage, the log among them."""
    with world.open_both(save_every=1, local_save_every=1, local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 2, 4, 6)
    spoil(world.persistent, stored)
    spoil(world.ramdisk, f"run/*/{in_ram}")
    before = contents_of(world.persistent)
    for _ in range(2):  # the second start finds what the first one has put into quarantine
        with (
            world.open_both(save_every=1, local_save_every=1, keep_last_n=1) as ckpt,
            pytest.raises(Unrecoverable),
        ):
            ckpt.restore(state=world.state(0), host_state={})
    assert contents_of(world.persistent) == before


@pytest.mark.parametrize("has_log", [True, False])
def test_restore_of_an_older_step_names_the_unreadable_newer(world: World, has_log: bool) -> None:
    persist(world, 2, 4)
    marker_of(world, 4).write_bytes(b"\xff")
    if not has_log:
        shutil.rmtree(log_of(world))
    with world.open_both(save_every=1, local_save_every=0, keep_last_n=1) as ckpt:
        _held = world.restores(2, by=ckpt)
        (rejected,) = ckpt.last_restore.rejected  # pyright: ignore[reportOptionalMemberAccess]
        assert (rejected.step, rejected.tier) == (4, "persistent")
        # The log is not compared with every marker at each call.
        assert ckpt.all_steps() == ([2, 4] if has_log else [2])
        save_all(ckpt, world, 3)
        assert ckpt.all_steps() == [3]
        save_all(ckpt, world, 4)
        assert ckpt.latest_step() == 4
    assert not list(world.persistent.glob("4.rolled-back-*"))  # its number was saved anew
    world.lose_ram()
    with world.open_both() as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 4


DAMAGE = {"empty": b"", "no text": b"\xff", "truncated": b"{", "other": b'{"format":1}'}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("versions", ["newest", "all"])
def test_damaged_versions_are_named_and_mended(world: World, damage: bytes, versions: str) -> None:
    """What no version names that can be read counts by its marker."""
    persist(world, 2, 4)
    paths = sorted(log_of(world).glob("*.json"))
    for path in paths if versions == "all" else paths[-1:]:
        path.write_bytes(damage)
    world.lose_ram()
    world.events.clear()
    with world.open_both(save_every=0) as ckpt:  # which mends nothing
        assert ckpt.restore(state=world.state(0))[0] == 4
        missing = world.named("persistent.problem", cause="log_missing")
        assert bool(missing) == (versions == "all")
    world.lose_ram()
    world.events.clear()
    with world.open_both(save_every=1, local_save_every=0) as ckpt:
        _held = world.restores(4, by=ckpt)
        damaged = world.named("persistent.problem", cause="log_damaged")
        assert any(paths[-1].name in str(e.fields["reason"]) for e in damaged)
        save_all(ckpt, world, 5)
    assert PersistentTier(str(world.persistent)).found.log.read().faults == ()
    assert complete_steps(str(world.persistent)) == [2, 4, 5]


def test_log_damaged_in_every_version_is_still_of_its_run(world: World) -> None:
    persist(world, 2)
    for path in log_of(world).glob("*.json"):
        path.write_bytes(b"{")
    world.lose_ram()
    with pytest.raises(DirectoryInUse, match="run 'run' saves there"), world.open_both(run_id="b"):
        pass


def test_restore_with_an_unreadable_marker_can_take_the_tensors(world: World) -> None:
    """Return the hint of the error."""
    persist(world, 2)
    marker_of(world, 2).write_bytes(b"\xff")
    shutil.rmtree(world.persistent / "host_state" / "2")
    with world.open_both() as ckpt:
        like = {name: leaf for name, leaf in world.state(0).items() if name != "empty"}
        assert ckpt.restore(state=like)[0] == 2


def test_oversized_document_in_storage_is_not_read_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of a terabyte would fill the memory before its digest is compared."""
    persist(world, 2)
    documents = marker_of(world, 2).parent
    tier = PersistentTier(str(world.persistent))
    marker = tier.find(2).marker
    assert marker is not None
    digest = marker.digests[0]
    assert tier.read_document(2, 0, 1, digest)
    for name in ("process_00000_of_00001.json", "checksums.json", "marker.json"):
        os.truncate(documents / name, 1 << 40)
    with pytest.raises(CorruptData, match="too long"):
        tier.read_document(2, 0, 1, digest)
    for module in (storage_directory, log_module):
        for name in {"MAX_MARKER_BYTES", "MAX_LOG_BYTES"} & vars(module).keys():
            monkeypatch.setattr(module, name, 1 << 20)
    with pytest.raises(CorruptData, match="it is not the one that the step log names"):
        tier.find(2)
    newest = max(log_of(world).glob("*.json"))
    os.truncate(newest, 1 << 40)
    (fault,) = tier.found.log.read().faults
    assert newest.name in str(fault)
