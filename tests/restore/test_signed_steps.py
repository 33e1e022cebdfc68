"""Steps of storage that this job's secret has not signed: named, or with a setting refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from forgery import write_sealed
from world import OTHER_SECRET, SECRET, STORAGE, World, finish, logged, restored, save_all

from emergency_ckpt.errors import ConfigError, Unrecoverable

REAL, FORGED = 6, 1_000_000
NAMES = ("marker.json", "checksums.json")


@pytest.fixture
def saved(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 4, REAL)
    world.lose_ram()
    world.events.clear()
    return world


def documents(world: World, step: int) -> Path:
    return world.persistent / "host_state" / str(step)


def forge(world: World, step: int = FORGED) -> None:
    """A whole step with a higher number, whose tensors anybody could have made."""
    shutil.copytree(world.persistent / str(REAL), world.persistent / str(step))
    shutil.copytree(documents(world, REAL), documents(world, step))
    marker = json.loads((documents(world, step) / "marker.json").read_bytes())["marker"]
    marker["save"]["step"] = step
    document = documents(world, step) / "process_00000_of_00001.json"
    document.write_bytes(document.read_bytes().replace(b'"step":6', b'"step":%d' % step))
    marker["digests"] = [hashlib.sha256(document.read_bytes()).hexdigest()]
    write_sealed(documents(world, step) / "marker.json", "marker", marker)


def strip(world: World, step: int) -> None:
    path = documents(world, step) / "marker.json"
    write_sealed(path, "marker", json.loads(path.read_bytes())["marker"])
    name_in_log(world, step)


def name_in_log(world: World, step: int) -> None:
    """Each version that lists ``step`` names its marker as that is now, and is not signed."""
    digest = hashlib.sha256((documents(world, step) / "marker.json").read_bytes()).hexdigest()
    for path in world.versions():
        version = json.loads(path.read_bytes())["version"]
        for entry in version.get("steps", ()):
            if entry["step"] == step:
                entry["marker"] = digest
                write_sealed(path, "version", version)


def is_signed(path: Path) -> bool:
    file = json.loads(path.read_bytes())
    assert file["format"] == 1
    return "signature" in file


def unsigned(world: World) -> list[tuple[Any, Any]]:
    return [
        (event.fields["step"], event.fields["reason"])
        for event in world.events
        if event.name == "restore.unsigned"
    ]


def test_restore_of_a_signed_step_says_nothing(saved: World) -> None:
    assert is_signed(documents(saved, REAL) / "marker.json")
    assert all(map(is_signed, saved.versions()))
    assert restored(saved, require={"signed"}) == REAL
    assert unsigned(saved) == []


def test_restore_of_a_forged_newer_step_is_named(saved: World) -> None:
    forge(saved)
    with logged() as lines, saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == FORGED
    assert unsigned(saved) == [(FORGED, "it is not signed")]
    assert len([line for line in lines if "it is not signed" in line]) == 1


def strip_newest(world: World) -> None:
    strip(world, REAL)


@pytest.mark.parametrize("how", [forge, strip_newest])
def test_require_signed_passes_over_what_is_not(saved: World, how: Callable[[World], None]) -> None:
    how(saved)
    with saved.open_both(**STORAGE, require={"signed"}) as ckpt:
        newest = ckpt.latest_step()
        assert ckpt.restore(state=saved.state(0))[0] == newest
        assert newest == (REAL if how is forge else 4)
        save_all(ckpt, saved, 7)
        assert ckpt.latest_step() == 7
    saved.lose_ram()
    assert restored(saved, require={"signed"}) == 7


def drop_from_log(world: World, step: int) -> None:
    """One more version, not signed, says that ``step`` is being removed."""
    newest = world.versions()[-1]
    version = json.loads(newest.read_bytes())["version"]
    version["number"] += 1
    for entry in version["steps"]:
        if entry["step"] == step:
            entry["state"] = "removing"
    write_sealed(newest.with_name(f"{version['number']:012d}.json"), "version", version)


def test_version_that_is_not_signed_is_named(saved: World) -> None:
    drop_from_log(saved, REAL)
    assert restored(saved, save_every=0) == 4
    notes = [e.fields["text"] for e in saved.events if e.name == "restore.note"]
    assert "the step log: it is not signed" in notes


def test_require_signed_passes_over_an_unsigned_version(saved: World) -> None:
    drop_from_log(saved, REAL)
    with saved.open_both(**STORAGE, require={"signed"}) as ckpt:
        assert ckpt.latest_step() == REAL
        assert ckpt.restore(state=saved.state(0))[0] == REAL
        save_all(ckpt, saved, 7)
    named = [e.fields["reason"] for e in saved.events if e.name == "persistent.log_damaged"]
    assert any("it is not signed, and require has 'signed'" in reason for reason in named)
    assert is_signed(saved.versions()[-1])
    saved.lose_ram()
    assert restored(saved, require={"signed"}) == 7


def test_require_signed_without_a_signed_version_takes_markers(saved: World) -> None:
    for path in saved.versions():
        write_sealed(path, "version", json.loads(path.read_bytes())["version"])
    assert restored(saved, require={"signed"}) == REAL


def test_require_signed_with_nothing_signed_is_no_fresh_start(saved: World) -> None:
    for step in (4, REAL):
        strip(saved, step)
    with pytest.raises(Unrecoverable, match="it is not signed, and require has 'signed'"):
        restored(saved, require={"signed"})


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("in_log", [False, True])
def test_restore_of_altered_crcs_takes_an_older_step(
    saved: World, required: bool, in_log: bool
) -> None:
    """The plain digests are right again; the signature is kept."""
    folder = documents(saved, REAL)
    checksums = json.loads((folder / "checksums.json").read_bytes())
    checksums["boxes"] = []
    (folder / "checksums.json").write_text(json.dumps(checksums, separators=(",", ":")))
    file = json.loads((folder / "marker.json").read_bytes())
    digest = hashlib.sha256((folder / "checksums.json").read_bytes()).hexdigest()
    file["marker"]["checksums"] = digest
    encoded = json.dumps(file["marker"], separators=(",", ":"))
    file["digest"] = hashlib.sha256(encoded.encode()).hexdigest()
    (folder / "marker.json").write_text(json.dumps(file, separators=(",", ":")))
    if in_log:
        name_in_log(saved, REAL)
    with logged() as lines:
        assert restored(saved, require={"signed"} if required else ()) == 4
    altered = "it was altered after it had been signed"
    problem = altered if in_log else "it is not the one that the step log names"
    assert any(problem in line for line in lines)


def test_restore_after_the_secret_changed_is_named(
    saved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECKPT_SECRET", OTHER_SECRET)
    with pytest.raises(Unrecoverable, match="signed with another secret, and require has 'signed'"):
        restored(saved, require={"signed"})
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == REAL
        save_all(ckpt, saved, 7)
    assert unsigned(saved) == [(REAL, "it is signed with another secret")]
    saved.lose_ram()
    assert restored(saved, require={"signed"}) == 7


def test_restore_without_a_secret_takes_a_signed_step(
    saved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECKPT_SECRET")
    assert restored(saved) == REAL
    assert unsigned(saved) == []
    with pytest.raises(ConfigError, match="require has 'signed', but no secret is given"):
        restored(saved, require={"signed"})


def test_restart_of_another_run_id_knows_its_signature(saved: World) -> None:
    assert restored(saved, run_id="other", save_every=0, require={"signed"}) == REAL
    assert unsigned(saved) == []


def test_require_signed_prefers_ram_to_a_forged_step(saved: World) -> None:
    both = {"save_every": 2, "local_save_every": 1, "require": {"signed"}}
    with saved.open_both(**both) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == REAL
        save_all(ckpt, saved, 7)
    forge(saved)
    saved.restores(7, **both)


def test_plain_orbax_step_is_named_and_with_the_setting_refused(saved: World) -> None:
    with ocp.CheckpointManager(saved.persistent) as manager:
        assert manager.latest_step() == REAL  # reads what is signed as ever
        state = {"w": np.zeros((8, 4), np.float32), "step": np.int32(0), "host": 0}
        manager.save(9, args=ocp.args.StandardSave(state))
    with saved.open_both(**STORAGE, require={"signed"}) as ckpt:
        assert ckpt.all_steps() == [4, REAL]
        assert ckpt.restore(state=saved.state(0))[0] == REAL
    assert unsigned(saved) == []


def test_plain_orbax_step_alone_is_taken_and_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(9, args=ocp.args.StandardSave({"w": np.ones(4, np.float32)}))
    for required in (True, False):
        with world.open_both(**STORAGE, require={"signed"} if required else ()) as ckpt:
            like = {"w": np.zeros(4, np.float32)}
            if required:
                with pytest.raises(Unrecoverable, match="it is not signed"):
                    ckpt.restore(state=like)
            else:
                assert ckpt.restore(state=like)[0] == 9
    assert unsigned(world) == [(9, "it is not signed")]


def test_save_at_an_unsigned_step_writes_it_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage has it by its marker; but who else wrote that may have known the life."""
    monkeypatch.setenv("ECKPT_SECRET", SECRET)
    with world.open_both() as ckpt:
        save_all(ckpt, world, 2)
    strip(world, 2)
    with world.open_both() as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2  # from RAM
        assert ckpt.save(step=2, state=world.state(2), host_state={"at": 2}, force=True)
        finish(ckpt)
    assert is_signed(documents(world, 2) / "marker.json")
    world.lose_ram()
    assert restored(world, require={"signed"}) == 2
    assert list(world.persistent.glob("2.rolled-back-*"))
