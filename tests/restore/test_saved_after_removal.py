"""A step that was removed is saved again when it is due."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, finish, save_all

TIERS: list[dict[str, Any]] = [
    {"save_every": 1, "local_save_every": 0},
    {"save_every": 0, "local_save_every": 1},
    {"save_every": 1, "local_save_every": 1},
]


@pytest.mark.parametrize("settings", TIERS, ids=["storage", "ram", "both"])
def test_newest_step_removed_is_saved_again(world: World, settings: dict[str, Any]) -> None:
    with world.open_both(**settings) as ckpt:
        save_all(ckpt, world, 1, 2, 3)
        for _ in range(2):
            ckpt.steps.remove(3)
            assert 3 not in ckpt.all_steps()
            assert ckpt.save(step=3, state=world.state(3))
            finish(ckpt)
            assert ckpt.latest_step() == 3
        save_all(ckpt, world, 4)
        assert ckpt.latest_step() == 4
    world.restores(4, **settings)
