"""A second life of a run saves a step while the first one, which hung, still writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp
import pytest
from places import JOBS
from twin_program import LEAVES, RUN_ID, state_of
from world import World

pytestmark = pytest.mark.timeout(300)
STEP = 4


class Life:
    """A process with one life of the run."""

    def __init__(self, world: World, number: int, point: str) -> None:
        ram = world.ramdisk.with_name(f"ram_{number}")
        words = [str(world.persistent), str(ram), str(number), point]
        self.process = subprocess.Popen(
            [sys.executable, str(JOBS / "twin_program.py"), *words],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=120)


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    found: list[Life] = []
    yield found
    for life in found:
        life.process.kill()
        life.process.communicate()


@pytest.mark.parametrize("point", ["data", "merge"])
def test_life_that_hung_does_not_spoil_the_next_ones_step(
    world: World, lives: list[Life], point: str
) -> None:
    first = Life(world, 1, point)
    lives.append(first)
    assert [first.read(), first.read()] == ["restored None", f"held {point}"]
    second = Life(world, 2, "merge")
    lives.append(second)
    assert second.read() == "restored 2"
    assert second.read() == "held merge"
    first.go_on()
    said, errors = first.end()
    assert said == "failed 1\n", errors
    second.go_on()
    said, errors = second.end()
    assert said == "failed 0\n", errors
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
