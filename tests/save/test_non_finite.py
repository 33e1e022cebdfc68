"""Values that are NaN or infinite: who is told of them, and the last step without stays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from world import World, finish, same

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import ConfigError

KEEP: dict[str, Any] = {"non_finite": "keep", "keep_last_n": 1, "save_every": 1}
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
    with pytest.raises(ConfigError, match="non_finite must be 'off', 'report' or 'keep'"):
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


@pytest.mark.parametrize("tiers", [{}, {"local_save_every": 0}], ids=["both", "storage"])
def test_storage_keeps_the_last_step_without(world: World, tiers: dict[str, Any]) -> None:
    with world.open_both(**KEEP, **tiers) as ckpt:
        for step in (1, 2):
            save(ckpt, world, step)
        for step in (3, 4):
            save(ckpt, world, step, {"w": np.nan})
        assert ckpt.latest_step() == 4
    with world.open_both(**KEEP, **tiers) as ckpt:  # by what the log says
        assert ckpt.restore(state=state_of(world, 0), host_state={"at": 0})[0] == 4
        save(ckpt, world, 5, {"w": np.nan})
        step, state = ckpt.restore(2, state=state_of(world, 0), host_state={"at": 0})
        assert step == 2
        assert same(state, state_of(world, 2))
        save(ckpt, world, 6)
        assert [path.name for path in world.persistent.glob("[0-9]*") if "." not in path.name] == [
            "6"
        ]


def test_report_keeps_no_more_than_was_asked_for(world: World) -> None:
    with world.open_both(keep_last_n=1, save_every=1) as ckpt:
        save(ckpt, world, 1)
        save(ckpt, world, 2, {"w": np.nan})
        assert ckpt.all_steps() == [2]


def test_ram_keeps_it_where_there_is_a_third_slot(world: World) -> None:
    settings: dict[str, Any] = {"non_finite": "keep", "local_keep_last_n": 2}
    with world.open(**settings) as ckpt:
        save(ckpt, world, 1)
        for step in (2, 3, 4):
            save(ckpt, world, step, {"w": np.nan})
    with world.open(**settings) as ckpt:
        assert ckpt.restore(state=state_of(world, 0), host_state={"at": 0})[0] == 4
        for step in (5, 6, 7):
            save(ckpt, world, step, {"w": np.nan})
        step, state = ckpt.restore(1, state=state_of(world, 0), host_state={"at": 0})
        assert step == 1
        assert same(state, state_of(world, 1))
        del state
        for step in (2, 3, 4, 5):
            save(ckpt, world, step)
    with world.open(**settings) as ckpt:
        assert 1 not in ckpt.steps.survey(state_of(world, 0)).local


def test_two_slots_of_ram_go_on_saving(world: World) -> None:
    with world.open(non_finite="keep") as ckpt:
        save(ckpt, world, 1)
        for step in (2, 3, 4):
            save(ckpt, world, step, {"w": np.nan})
        assert ckpt.latest_step() == 4
        assert ckpt.failed_saves == 0
