"""Steps that were rolled back: `eckpt ls`, a restore by number, and `eckpt doctor --clean`."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from forgery import write_sealed
from looks import eckpt, eckpt_json, tree_of
from persistent_steps import RUN_ID, life, save_over, writer_of
from world import STORAGE, World, save_all

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import StepNotFound
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId

DAY_S = 86400.0


@pytest.fixture
def rolled_back(world: World) -> World:
    """Steps 2, 4, 6, 8, of which the last three were rolled back, and 4 was saved again."""
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4, 6, 8)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(2, state=world.state(0))
        save_all(ckpt, world, 4)
    world.lose_ram()
    return world


def hidden(directory: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in directory.rglob("*.rolled-back-*"))


def restored(world: World, step: int | None = None) -> int | None:
    with world.open_both(**STORAGE) as ckpt:
        found, _ = ckpt.restore(step, state=world.state(0))
    world.lose_ram()
    return found


def test_ls_lists_steps_that_were_rolled_back(rolled_back: World) -> None:
    status, listed = eckpt_json("ls", "--dir", rolled_back.persistent)
    assert status == 0
    found = {(each["step"], each["state"]) for each in listed["steps"]}
    assert found == {(2, "whole"), (4, "whole"), (6, "rolled_back"), (8, "rolled_back")}
    assert eckpt("ls", "--dir", rolled_back.persistent).stdout.count("6.rolled-back-") == 2


def test_clean_lists_them_and_removes_them_when_told(rolled_back: World) -> None:
    world = rolled_back
    directory = world.persistent
    listed = eckpt("doctor", "--clean", "--dir", directory, "--older-than", "0")
    assert listed.returncode == 0
    assert listed.stdout.count("would be removed") == 2
    assert (
        eckpt("doctor", "--clean", "--dir", directory, "--yes").stdout.count(
            "stays: not old enough"
        )
        == 2
    )
    assert hidden(directory) == ["6.rolled", "8.rolled"]
    done = eckpt("doctor", "--clean", "--dir", directory, "--older-than", "0", "--yes")
    assert (done.returncode, done.stdout.count("removed")) == (0, 2), done
    assert hidden(directory) == []
    with pytest.raises(StepNotFound):
        restored(world, 6)
    assert restored(world) == 4


def saved_at(directory: Path, saved_s: float) -> None:
    """Let the clocks of all writers, and so the log, have said this time of each save."""
    newest = max((directory / "host_state" / "log").glob("[0-9]*.json"))
    version = json.loads(newest.read_bytes())["version"]
    for entry in version["steps"]:
        entry["saved_s"] = saved_s
    write_sealed(newest, "version", version)


def cleaned(directory: object, older_than: str = "1d") -> str:
    words = ("--dir", directory, "--older-than", older_than, "--yes")
    done = eckpt("doctor", "--clean", *words)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.parametrize("saved_s", [0.0, time.time() - 2 * DAY_S], ids=["unknown", "old"])
def test_clean_leaves_steps_that_were_hidden_just_now(rolled_back: World, saved_s: float) -> None:
    directory = rolled_back.persistent
    saved_at(directory, saved_s)
    before = tree_of(directory)
    assert eckpt("doctor", "--clean", "--dir", directory).stdout.count("stays: not old enough") == 2
    assert tree_of(directory) == before
    assert cleaned(directory).count("stays: not old enough") == 2
    assert hidden(directory) == ["6.rolled", "8.rolled"]
    names = sorted(path.name for path in (directory / "host_state").iterdir())
    assert names == ["2", "4", "6", "8", "log"]


def test_clean_takes_steps_hidden_for_long_by_the_files(rolled_back: World) -> None:
    """Whatever a writer's clock has said; of a step without its folder nobody knows the time."""
    directory = rolled_back.persistent
    saved_at(directory, time.time() + DAY_S)
    (folder,) = directory.glob("6.rolled-back-*")
    shutil.rmtree(folder)
    time.sleep(1.1)
    output = cleaned(directory, "1s")
    assert (output.count("stays"), output.count("removed")) == (1, 1), output
    assert hidden(directory) == []
    assert cleaned(directory, "0").count("removed") == 1


def test_clean_of_a_bucket_goes_by_the_times_of_its_log(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, clock = PersistentTier("gs://bucket/run"), time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: clock() - 2 * DAY_S)
        for step in (2, 4):
            save_over(tier, step, step, life(1))
    chain = continued(None, SaveId(2, life(1), RUN_ID), life(2))
    writer_of(tier).begin(life(2), chain)
    names = gcs.object_names("bucket", "run/")
    assert "stays: not old enough" in cleaned(tier.directory)
    assert gcs.object_names("bucket", "run/") == names
    time.sleep(1.1)
    save_over(tier, 6, 6, life(2))
    assert "removed" in cleaned(tier.directory, "1s")
    assert not gcs.object_names("bucket", "run/4/")
