"""A checkpointer that nobody stopped and nobody refers to any more ends by itself; each face's."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from every_face import KINDS, opener
from orbax_faces import state, target
from programs import started
from world import World, same, save_all

from emergency_ckpt import EmergencyCheckpointer

LONG_S = 300.0
"""Of a program that hangs; a busy machine needs half a minute for one that does not."""

PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from emergency_ckpt import EmergencyCheckpointer

def train():
    checkpointer = EmergencyCheckpointer(
        run_id="run", local_dir=sys.argv[1], dir=sys.argv[2], local_save_every=1, save_every=1)
    checkpointer.restore(state={"w": jnp.zeros(8)})
    checkpointer.save(step=7, state={"w": jnp.ones(8)})

train()
if sys.argv[3] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs what atexit knows
    print(os.waitpid(child, 0)[1], flush=True)
if sys.argv[3] != "at once":
    print("dropped", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, world: World) -> Callable[[], Any]:
    return opener(request.param, world)


@pytest.fixture
def saved(world: World, opened: Any) -> None:
    """Leave steps 0 to 3 to the next one: RAM alone has the newest."""
    face = opened()
    for step in range(4):
        face.save(step, state(world, step))
        face.wait()


@pytest.mark.usefixtures("saved")
def test_step_of_ram_is_restored_twice(world: World, opened: Any) -> None:
    for _ in range(2):
        assert same(opened().load(3, target(world)), state(world, 3))
    assert not world.named("ram.off", cause="given_up")


@pytest.mark.usefixtures("saved")
def test_restore_after_one_that_raised(world: World, opened: Any) -> None:
    """While the error is handled its traceback refers to all that it came through."""
    try:
        opened().load(77, target(world))
    except Exception:  # noqa: BLE001 - each face has its own
        assert same(opened().load(3, target(world)), state(world, 3))
    else:
        pytest.fail("step 77 was restored")
    assert not world.named("ram.off", cause="given_up")


@pytest.mark.usefixtures("saved")
def test_restore_beside_one_in_a_cycle(world: World, opened: Any) -> None:
    gc.disable()
    try:
        cycle: list[Any] = [opened()]
        cycle.append(cycle)
        del cycle
        assert same(opened().load(3, target(world)), state(world, 3))
    finally:
        gc.enable()
    assert not world.named("ram.off", cause="given_up")


def test_save_in_progress_is_finished(world: World) -> None:
    save_all(world.open(), world, 1)
    assert world.open().save(step=2, state=world.state(2))
    world.restores(2, by=world.open())


def test_other_process_may_have_the_directory(world: World) -> None:
    with started("-c", PROGRAM, world.ramdisk, world.persistent, "wait") as program:
        assert program.line() == "dropped"
        with world.open_both() as checkpointer:
            assert checkpointer.latest_step() == 7
        program.say()
        assert program.wait(LONG_S) == 0


def test_fork_after_it_leaves_the_end_to_the_parent(world: World) -> None:
    with started("-c", PROGRAM, world.ramdisk, world.persistent, "fork") as program:
        assert (program.line(), program.line()) == ("0", "dropped")
        program.say()
        assert program.wait(LONG_S) == 0
    with world.open_both() as checkpointer:
        assert checkpointer.all_steps() == [7]


@pytest.mark.skipif(
    (3, 12) <= sys.version_info[:3] < (3, 12, 3), reason="this Python starts no thread at the end"
)
def test_program_ends_while_one_ends(world: World) -> None:
    with started("-c", PROGRAM, world.ramdisk, world.persistent, "at once") as program:
        assert program.wait(LONG_S) == 0
    world.lose_ram()
    with world.open_both() as checkpointer:
        assert checkpointer.all_steps() == [7]


def test_threads_and_sockets_are_gone(world: World) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2)
    before = open_files()
    for _ in range(3):
        world.open_both().restore(state=world.state(0))
    with world.open_both():
        pass  # waits for the others
    assert open_files() <= before


def test_forked_child_ends_nothing_of_its_parent(world: World) -> None:
    checkpointer: EmergencyCheckpointer | None = world.open()
    save_all(checkpointer, world, 1)
    child = os.fork()
    if child == 0:
        checkpointer = None
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    save_all(checkpointer, world, 2)
    checkpointer.stop()
