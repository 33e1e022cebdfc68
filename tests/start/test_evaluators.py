"""A manager that only reads, beside the process that trains: it claims and changes nothing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from every_face import opener
from launch_support import free_port
from orbax_faces import state, target
from places import JOBS
from programs import Program, started
from world import World, logged, same, save_all

import emergency_ckpt.orbax.checkpoint as our_v0
import emergency_ckpt.orbax.v1 as our_v1
from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import CheckpointError, LocalTierError

EVALUATED = ["native", "emergency", "v0", "v1"]


KILLED = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
from orbax_faces import target
from world import World

world = World(Path(sys.argv[1]).parent)
evaluator = world.open_both(local_save_every=0, save_every=0)
print(evaluator.restore(state=target(world))[0], flush=True)
sys.stdin.readline()
"""


def contents(world: World) -> dict[Path, bytes]:
    """Return every file of the trainer's, in RAM and in storage."""
    files = [path for root in (world.ramdisk, world.persistent) for path in root.rglob("*")]
    return {path: path.read_bytes() for path in files if path.is_file()}


class Evaluator:
    """A reader of the directories, at one face. ``own`` is what the user has."""

    def __init__(self, kind: str, world: World) -> None:
        self.kind, self.world = kind, world
        self.own: Any = getattr(self, f"_{kind}")(world)

    def _native(self, world: World) -> Any:
        return world.open_both(local_save_every=0, save_every=0)

    def _emergency(self, world: World) -> Any:
        local = emergency.LocalCheckpointOptions(read_only=True)
        stored = emergency.PersistentCheckpointOptions(read_only=True)
        settings = {"on_event": world.events.append}
        options = emergency.CheckpointManagerOptions(
            local=local, persistent=stored, settings=settings
        )
        places = (world.ramdisk, world.persistent, world.mesh, target(world))
        return emergency.CheckpointManager(*places, options=options)

    def _v0(self, world: World) -> Any:
        settings = {"mesh": world.mesh, "on_event": world.events.append}
        options = our_v0.CheckpointManagerOptions(
            read_only=True, local_directory=world.ramdisk, settings=settings
        )
        return our_v0.CheckpointManager(world.persistent, options=options)

    def _v1(self, world: World) -> Any:
        settings = {"mesh": world.mesh, "on_event": world.events.append, "local_save_every": 0}
        return our_v1.training.Checkpointer(
            world.persistent, local_directory=world.ramdisk, settings=settings
        )

    def load(self, step: int | None = None) -> Any:
        """Restore ``step``, or the newest one; return the state."""
        wanted = target(self.world)
        if self.kind == "native":
            return self.own.restore(step, state=wanted)[1]
        if self.kind == "emergency":
            return self.own.restore(step).state
        if self.kind == "v1":
            return self.own.load_checkpointables(step, {"state": wanted})["state"]
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        return self.own.restore(step, args=args).state

    def reload(self) -> None:
        """Read the directories again, where the face asks for that."""
        if self.kind != "native":
            self.own.reload()

    def close(self) -> None:
        self.own.stop() if self.kind == "native" else self.own.close()


class Trainer:
    """A process that trains."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.restored = program.line()
        """The newest step that it found."""

    def save(self, *steps: int, stores: bool = False) -> None:
        for step in steps:
            self.program.say(f"{step} stored" if stores else str(step))
            assert self.program.line() == "saved"

    def end(self) -> None:
        self.program.stdin.close()
        assert self.program.wait(60) == 0


@pytest.fixture(params=EVALUATED)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.contextmanager
def trainer_of(world: World, kind: str) -> Iterator[Trainer]:
    root = world.ramdisk.parent
    with started(JOBS / "trained_program.py", root, kind) as program:
        yield Trainer(program)


def test_evaluator_reads_storage_and_changes_nothing(world: World, kind: str) -> None:
    with trainer_of(world, kind) as trainer, logged() as lines:
        trainer.save(1, stores=True)
        trainer.save(2)
        before = contents(world)
        evaluator = Evaluator(kind, world)
        assert same(evaluator.load(), state(world, 1))
        assert evaluator.own.latest_step() == 1 if kind != "v1" else evaluator.own.latest.step == 1
        assert contents(world) == before
        trainer.save(3, 4, stores=True)
        trainer.save(5)
        before = contents(world)
        evaluator.reload()
        assert same(evaluator.load(), state(world, 4))
        assert same(evaluator.load(1), state(world, 1))
        assert same(evaluator.load(), state(world, 4))
        evaluator.close()
        assert contents(world) == before
        trainer.save(6, stores=True)
        trainer.end()
    assert not [line for line in lines if "waiting" in line or "full" in line]
    assert not world.named("ram.off")


def test_trainer_starts_again_beside_an_evaluator(world: World, kind: str) -> None:
    with trainer_of(world, kind) as trainer:
        trainer.save(1, stores=True)
        trainer.save(2)
        evaluator = Evaluator(kind, world)
        assert same(evaluator.load(), state(world, 1))
        trainer.program.kill()
        trainer.program.wait(60)
    with trainer_of(world, kind) as trainer:
        assert trainer.restored == "2"
        trainer.save(3, stores=True)
        evaluator.reload()
        assert same(evaluator.load(), state(world, 3))
        trainer.end()
    evaluator.close()


def test_evaluator_before_the_first_step_finds_none(world: World) -> None:
    with world.open_both(local_save_every=0, save_every=0) as evaluator:
        assert evaluator.restore(state=world.state(0))[0] is None
        assert evaluator.latest_step() is None
        assert not world.ramdisk.exists()
        assert not world.persistent.exists()
        with trainer_of(world, "native") as trainer:
            assert trainer.restored == "None"
            trainer.save(1, stores=True)
            restored = evaluator.restore(state=target(world))
            assert (restored[0], same(restored[1], state(world, 1))) == (1, True)
            trainer.end()
    assert not [text for text in texts(world) if "begins anew" in text]


def test_evaluator_saves_and_removes_nothing(world: World) -> None:
    with trainer_of(world, "native") as trainer:
        trainer.save(1, 2, stores=True)
        before = contents(world)
        with world.open_both(local_save_every=0, save_every=0) as evaluator:
            evaluator.restore(1, state=target(world))
            assert not evaluator.save(step=5, state=state(world, 5))
            assert not evaluator.save(step=6, state=state(world, 6), force=True)
            with pytest.raises(CheckpointError, match="this checkpointer only reads"):
                evaluator.steps.remove(2)
        assert contents(world) == before
        trainer.save(3, stores=True)
        trainer.end()


def test_evaluator_leaves_no_files(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    world.restores(None, local_save_every=0, save_every=0)
    assert not list(tmp_path.iterdir())


def test_evaluators_in_the_process_that_trains(world: World, kind: str) -> None:
    trainer = opener(kind, world)()
    for step in (1, 2):
        trainer.save(step, state(world, step), force=step == 1)
        trainer.wait()
    evaluators = [Evaluator(kind, world) for _ in range(2)]
    for evaluator in evaluators:
        assert same(evaluator.load(), state(world, 1))
        evaluator.close()
    with pytest.raises(Exception, match="7"):  # each face has its own
        trainer.load(7, target(world))
    assert same(Evaluator(kind, world).load(), state(world, 1))
    assert trainer.save(3, state(world, 3))
    trainer.wait()
    assert same(trainer.load(3, target(world)), state(world, 3))
    trainer.close()
    assert not world.named("ram.off", cause="given_up")


def test_evaluator_has_the_settings_of_the_trainer(world: World) -> None:
    """Its address and its directory in RAM too, and both keep their places."""
    port = free_port()
    with world.open_both(bind_port=port) as trainer:
        save_all(trainer, world, 1, 2, 3)
        world.restores(2, local_save_every=0, save_every=0, bind_port=port)
        world.restores(3, by=trainer)


def test_killed_evaluator_leaves_nothing_to_the_trainer(world: World, tmp_path: Path) -> None:
    words = ("-c", KILLED, world.ramdisk, world.persistent)
    with trainer_of(world, "native") as trainer:
        trainer.save(1, 2, stores=True)
        before = contents(world)
        with started(*words, env={"TMPDIR": str(tmp_path)}) as evaluator:
            assert evaluator.line() == "2"
            evaluator.kill()
            evaluator.wait(60)
        assert contents(world) == before
        trainer.save(3)
        trainer.end()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 10_000


def test_second_trainer_is_told_how_an_evaluator_is_made(world: World) -> None:
    with trainer_of(world, "native") as trainer, logged() as lines:
        trainer.save(1)
        with pytest.raises(LocalTierError, match="save_every=0"):
            world.open_both(start_timeout_s=1.0)
        trainer.save(2)
        trainer.end()
    (line,) = [line for line in lines if "waiting up to" in line]
    assert "save_every=0" in line


def texts(world: World) -> list[str]:
    return [str(event.fields["text"]) for event in world.named("warning", cause="setting")]
