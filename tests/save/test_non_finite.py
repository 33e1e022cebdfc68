"""Values that are NaN or infinite: who is told of them, and when."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from world import World, finish

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import ConfigError

TIERS: dict[str, dict[str, Any]] = {
    "both": {},
    "RAM": {"save_every": 0},
    "storage": {"local_save_every": 0},
}


def state_of(world: World, step: int, bad: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the state of ``step`` with a second leaf; ``bad``: a value of each of these leaves."""
    state = {**world.state(step), "v": np.full(3, step, np.float64)}
    for leaf, value in (bad or {}).items():
        array = np.asarray(state[leaf]).copy()
        array.flat[1] = value
        state[leaf] = array if leaf == "v" else jax.device_put(array, state[leaf].sharding)
    return state


def save(
    ckpt: EmergencyCheckpointer, world: World, step: int, bad: dict[str, float] | None = None
) -> None:
    assert ckpt.save(step=step, state=state_of(world, step, bad), host_state={"at": step})
    finish(ckpt)


def told(world: World) -> list[tuple[object, ...]]:
    events = [event.fields for event in world.events if event.name == "save.non_finite"]
    return [(each["step"], each["leaves"], each["values"]) for each in events]


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_leaves_that_were_finite_are_named_once(world: World, tiers: dict[str, Any]) -> None:
    with world.open_both(**{"save_every": 1, **tiers}) as ckpt:
        save(ckpt, world, 1, {"v": np.inf})  # from the start: nobody knows better
        save(ckpt, world, 2, {"v": np.inf})
        assert told(world) == []
        save(ckpt, world, 3, {"w": np.nan})
        (event,) = [each for each in world.events if each.name == "save.non_finite"]
        assert event.fields["text"] == (
            "values of step 3 are NaN or infinite in leaves that were finite: w: 1"
        )
        save(ckpt, world, 4, {"w": np.nan})
        assert told(world) == [(3, 1, 1)]
        save(ckpt, world, 5)
        save(ckpt, world, 6, {"w": -np.inf, "v": np.nan})
        assert told(world) == [(3, 1, 1), (6, 2, 2)]


def test_off_says_nothing_and_another_value_is_refused(world: World) -> None:
    with world.open_both(save_every=1, non_finite="off") as ckpt:
        save(ckpt, world, 1)
        save(ckpt, world, 2, {"w": np.nan})
    assert told(world) == []
    with pytest.raises(ConfigError, match="non_finite must be 'off' or 'report'"):
        world.open(non_finite="warn")


def test_restored_finite_step_is_known_to_be_finite(world: World) -> None:
    with world.open_both() as ckpt:
        save(ckpt, world, 1)
    with world.open_both() as ckpt:
        assert ckpt.restore(state=state_of(world, 0), host_state={"at": 0})[0] == 1
        save(ckpt, world, 2, {"w": np.nan})
        assert told(world) == [(2, 1, 1)]
        assert ckpt.restore(state=state_of(world, 0), host_state={"at": 0})[0] == 2
        save(ckpt, world, 3, {"w": np.nan})  # once more after a restore in place
        assert told(world) == [(2, 1, 1), (3, 1, 1)]
