"""``eckpt drain``: what was in RAM alone is in storage afterwards, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable

import pytest
from damage import flip
from drains import Drains, Position
from faults import hidden_fails
from looks import eckpt_here, tree_of
from places import JOBS
from programs import ended
from world import save_all

from emergency_ckpt.ram.step_reader import RamStep
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.tier import Array
from emergency_ckpt.types import Box


def test_drain_then_all_ram_lost_restores_that_step(drains: Drains) -> None:
    drains.save(1, 2, 3)
    before = tree_of(drains.world.ramdisk)
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 3, True)
    assert tree_of(drains.world.ramdisk) == before
    stored = drains.stored()
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 3, False)
    assert drains.stored() == stored
    assert drains.restored_from_storage() == (3, 30)
    drains.save(4, 5, save_every=1)  # and the run saves there
    assert drains.restored_from_storage() == (5, 50)


def test_drain_older_than_storage_does_nothing(drains: Drains) -> None:
    drains.save(2)
    kept = drains.copy_of_ram()
    drains.save(4, save_every=1)
    stored = drains.stored()
    code, found = drains.drain(local_dir=kept)
    assert (code, found["step"], found["is_written"]) == (0, 4, False)
    assert drains.stored() == stored


def test_drain_of_step_without_documents_in_storage_writes_it(drains: Drains) -> None:
    drains.save(2, 4, save_every=1)
    shutil.rmtree(drains.world.persistent / "host_state" / "4")
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 4, True)
    assert drains.restored_from_storage() == (4, 40)


def test_drain_while_the_job_runs_is_refused(drains: Drains) -> None:
    world = drains.world
    with world.open_both(require={"storage"}) as ckpt:  # the probe of storage is over then
        save_all(ckpt, world, 1)
        world.persistent.mkdir(exist_ok=True)
        stored = drains.stored()
        code, message = drains.refused()
        assert (code, f"process {os.getpid()}" in message) == (1, True)
        assert drains.stored() == stored
        save_all(ckpt, world, 2, 3)
    assert drains.drain()[1]["step"] == 3


def test_drain_of_a_lost_host_leaves_the_job_alone(drains: Drains) -> None:
    """Not noticed: the job runs on hosts that the drain was not given."""
    world, position = drains.world, Position()
    drains.save(2, save_every=2)
    drains.save(5)
    left = drains.copy_of_ram()  # of a host that is out of the job from here on
    with world.open_both(save_every=4) as ckpt:
        assert ckpt.restore(state=world.state(-1), host_state=position)[0] == 5
        for step in (6, 7, 8, 9):
            position.at = 10 * step
            ckpt.save(step=step, state=world.state(step), host_state=position)
            ckpt.wait_until_finished()
            if step == 6:
                code, found = drains.drain(local_dir=left)
                assert (code, found["step"], found["is_written"]) == (0, 5, True)
        code, found = drains.drain(local_dir=left)
        assert (code, found["step"], found["is_written"]) == (0, 8, False)
        ckpt.check_for_errors()
    assert drains.restored() == (9, 90)
    assert drains.restored_from_storage() == (8, 80)


def test_drain_of_rolled_back_lives_follows_the_timeline(drains: Drains) -> None:
    """Storage has step 8 of a life that was rolled back to step 4; RAM has 6 of the new one."""
    world, position = drains.world, Position()
    drains.save(4, 8, save_every=1)
    kept = drains.copy_of_ram()
    with world.open_both(save_every=0) as ckpt:
        # The arrays are not kept: while they live, they hold the ramdisk.
        assert ckpt.restore(step=4, state=world.state(-1), host_state=position)[0] == 4
        position.at = 61
        ckpt.save(step=6, state=world.state(6), host_state=position)
        ckpt.wait_until_finished()
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 6, True)
    assert drains.restored_from_storage() == (6, 61)
    # A host comes back with RAM of the old life: storage knows better.
    code, found = drains.drain(local_dir=kept)
    assert (found["step"], found["is_written"]) == (6, False)
    assert "rolled back" in " ".join(found["notes"])


def test_drain_that_cannot_hide_steps_has_drained(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, position = drains.world, Position()
    drains.save(4, 8, save_every=1)
    with world.open_both(save_every=0) as ckpt:
        assert ckpt.restore(step=4, state=world.state(-1), host_state=position)[0] == 4
        position.at = 60
        ckpt.save(step=6, state=world.state(6), host_state=position)
        ckpt.wait_until_finished()
    with monkeypatch.context() as storage:
        hidden_fails(storage)
        code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 6, True)
    assert drains.restored_from_storage() == (6, 60)


def test_drain_beside_another_life_of_one_number_follows_the_log(drains: Drains) -> None:
    """A host was away for the life that storage has, and began one of that number without it."""
    world, position = drains.world, Position()
    drains.save(4, save_every=1)
    with world.open() as ckpt:  # storage is away
        assert ckpt.restore(state=world.state(-1))[0] == 4
        save_all(ckpt, world, 6, 8)
    elsewhere = world.ramdisk.rename(f"{world.ramdisk}.elsewhere")
    with world.open_both(save_every=1, local_save_every=0) as ckpt:
        assert ckpt.restore(state=world.state(-1), host_state=position)[0] == 4
        for step in (6, 12):
            position.at = 10 * step
            ckpt.save(step=step, state=world.state(step), host_state=position)
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
    code, found = drains.drain(local_dir=elsewhere)
    assert (code, found["step"], found["is_written"]) == (0, 12, False), found
    assert any("step 8 in RAM is passed over" in note for note in found["notes"])
    shutil.rmtree(elsewhere)
    assert drains.restored(save_every=1, local_save_every=0) == (12, 120)


def test_drain_into_another_runs_directory_is_refused(drains: Drains) -> None:
    with drains.world.open_both(run_id="other", save_every=1) as ckpt:
        save_all(ckpt, drains.world, 1)
    drains.save(7, dir=None)
    stored = drains.stored()
    code, message = drains.refused()
    assert (code, "several runs: other, run" in message) == (2, True)
    code, message = drains.refused("--run-id", "run")
    assert (code, "run 'other' saves there" in message) == (1, True)
    assert drains.stored() == stored


def test_drain_of_damaged_copy_takes_an_older_step(drains: Drains) -> None:
    drains.save(1, 2, local_keep_last_n=2)
    slots = {json.loads(path.read_bytes())["manifest"]["contents"]["save"]["step"]: path
             for path in drains.world.ramdisk.rglob("slot_*.manifest.json")}  # fmt: skip
    flip(slots[2].with_name(slots[2].name.replace(".manifest.json", ".bin")), 64)
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (1, 1, True)
    assert any("no copy is sound" in note for note in found["notes"])
    assert any("step 2 was whole in RAM once" in note for note in found["notes"])
    assert drains.restored_from_storage() == (1, 10)


def test_drain_without_whole_step_says_what_is_missing(drains: Drains) -> None:
    world = drains.world
    drains.save(3)
    for path in world.ramdisk.rglob("process_*_of_*.json"):
        path.unlink()
    code, found = drains.drain()
    assert (code, found["step"]) == (1, None)
    assert any("no host state is held anywhere" in note for note in found["notes"])
    world.lose_ram()
    world.ramdisk.mkdir(mode=0o700)
    assert drains.drain("--run-id", "run")[0] == 1
    assert eckpt_here("drain", "--dir", world.persistent) == 2


def test_drain_of_a_run_with_a_secret_saves_the_step(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, generate_secret().decode())
    drains.save(3)
    assert drains.drain()[0] == 0
    assert drains.restored_from_storage() == (3, 30)


LIMIT_S, PAUSE_S = 4.0, 1.5
"""The limit of a write, and the pause before each read: those of one leaf together are longer."""


def pause_before_each_write(monkeypatch: pytest.MonkeyPatch, pause: Callable[[], object]) -> None:
    """Call ``pause`` when a box is read once more, after the check of all."""
    read, checked = RamStep.read, set[tuple[str, Box]]()

    def paused(step: RamStep, path: str, box: Box) -> Array:
        if (path, box) in checked:
            pause()
        checked.add((path, box))
        return read(step, path, box)

    monkeypatch.setattr(RamStep, "read", paused)


def test_drain_whose_bytes_move_all_the_time_is_not_given_up(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains.save(3)
    pauses: list[None] = []

    def pause() -> None:
        pauses.append(time.sleep(PAUSE_S))

    pause_before_each_write(monkeypatch, pause)
    code, outcome = drains.drain("--write-timeout", str(LIMIT_S))
    assert (code, outcome["step"], outcome["is_written"]) == (0, 3, True)
    assert len(pauses) * PAUSE_S > LIMIT_S
    assert drains.restored_from_storage() == (3, 30)


def test_drain_in_which_nothing_moves_has_an_end(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains.save(3)
    released = threading.Event()
    with monkeypatch.context() as patch:
        pause_before_each_write(patch, released.wait)
        code, message = drains.refused("--write-timeout", "1")
        released.set()
    assert (code, "nothing has moved for" in message) == (1, True), message
    assert drains.drain()[1]["is_written"]
    assert drains.restored_from_storage() == (3, 30)


KILLED = """
import os, signal, sys
from emergency_ckpt.tools.cli.main import main
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage.step_writer import StepWriter
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
points = {"claim": (DirectoryWriter, "make_room"), "documents": (StepWriter, "write"),
          "tensors": (PersistentTier, "finish"), "marker": (DirectoryWriter, "publish"),
          "version": (DirectoryWriter, "settle")}
setattr(*points[sys.argv[1]], die)
main(sys.argv[2:])
"""


@pytest.fixture
def environment() -> dict[str, str]:
    """Of a machine on which JAX would find no accelerator that it is told to take."""
    return {**os.environ, "JAX_PLATFORMS": "no such platform"}


@pytest.mark.parametrize("point", ["claim", "documents", "tensors", "marker", "version"])
def test_drain_killed_loses_nothing_and_is_repeated(
    drains: Drains, environment: dict[str, str], point: str
) -> None:
    world, is_complete = drains.world, point in ("marker", "version")
    drains.save(2, save_every=2)
    drains.save(5)
    done = ended(JOBS / "text_program.py", KILLED, point, *drains.words(), env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    places = world.ramdisk, world.persistent
    held, stored = (path.with_name(f"{path.name}-kept") for path in places)
    for path, kept in zip(places, (held, stored), strict=True):
        shutil.copytree(path, kept)
    # The job starts again, with its RAM or without: nothing half-written is taken.
    assert drains.restored() == (5, 50)
    if not is_complete:
        shutil.rmtree(world.persistent)
        shutil.copytree(stored, world.persistent)
        assert drains.restored_from_storage() == (2, 20)
    world.lose_ram()
    # Or the drain is repeated.
    shutil.rmtree(world.persistent)
    stored.rename(world.persistent)
    held.rename(world.ramdisk)
    code, found = drains.drain()
    assert (code, found["step"], found["is_written"]) == (0, 5, not is_complete)
    _assert_nothing_else(drains)
    assert drains.restored_from_storage() == (5, 50)


def _assert_nothing_else(drains: Drains) -> None:
    """No part of a save that did not end is left, nor any other trace of a drain."""
    directory = drains.world.persistent
    names = {path.name.partition(".rolled-back-")[0] for path in directory.iterdir()}
    names -= {"host_state"}
    below = {path.name for path in (directory / "host_state").iterdir()} - {"log"}
    assert names == below
    assert not [name for name in names if "orbax-checkpoint-tmp" in name]
    assert not list(directory.rglob("*.tmp"))
