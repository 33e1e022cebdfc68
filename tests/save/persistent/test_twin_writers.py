"""A second life of a run saves a step while the first one, which hung, still writes it."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager

import numpy as np
import orbax.checkpoint as ocp
import pytest
from places import JOBS
from programs import Program, started
from twin_program import LEAVES, RUN_ID, state_of
from world import World

pytestmark = pytest.mark.timeout(300)
STEP = 4


def life(world: World, number: int, point: str) -> AbstractContextManager[Program]:
    """A process with one life of the run."""
    ram = world.ramdisk.with_name(f"ram_{number}")
    words = (JOBS / "twin_program.py", world.persistent, ram, number, point)
    return started(*words, stderr=subprocess.PIPE)


@pytest.mark.parametrize("point", ["data", "merge"])
def test_life_that_hung_does_not_spoil_the_next_ones_step(world: World, point: str) -> None:
    with life(world, 1, point) as first:
        assert [first.line(), first.line()] == ["restored None", f"held {point}"]
        with life(world, 2, "merge") as second:
            assert [second.line(), second.line()] == ["restored 2", "held merge"]
            for each, failed in ((first, 1), (second, 0)):
                each.say()
                said, errors = each.communicate(timeout=120)
                assert said == f"failed {failed}\n", errors
    check(world, life=2)


def check(world: World, *, life: int) -> None:
    """Storage has the step of ``life`` and nothing of another, for us and for plain Orbax."""
    want = state_of(STEP, life)
    with world.open(dir=str(world.persistent), run_id=RUN_ID) as ckpt:
        found, state = ckpt.restore(state=state_of(0, 0))
    assert found == STEP
    assert all(np.array_equal(state[name], want[name]) for name in want), LEAVES
    stored = ocp.StandardCheckpointer().restore(world.persistent / str(STEP) / "state")
    assert all(np.array_equal(stored[name], want[name]) for name in want)
