"""Lives whose leader has a wrong clock: what they save counts, what they left does not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World, same, save_all

DAY_S, HOUR_S = 86_400, 3_600

TIERS: dict[str, dict[str, Any]] = {
    "ram": {},
    "storage": {"save_every": 1, "local_save_every": 0},
    "both": {"save_every": 1},
}


class Clock:
    """The wall clock of the leader. ``ahead_s``: by how much it is ahead of the real one."""

    def __init__(self) -> None:
        self.ahead_s = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made, now_s, now_ns = Clock(), time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now_s() + made.ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + made.ahead_s * 1_000_000_000)
    yield made
    monkeypatch.undo()


def live(
    world: World,
    *steps: int,
    tier: str = "ram",
    restores: bool = True,
    step: int | None = None,
) -> int | None:
    """One life: restore ``step`` or the newest, then save ``steps``. Returns what was restored."""
    found = None
    opened = world.open if tier == "ram" else world.open_both
    with opened(**TIERS[tier]) as ckpt:
        if restores:
            found, state = ckpt.restore(step, state=world.state(0))
            assert found is None or same(state, world.state(found))
        save_all(ckpt, world, *steps)
    world.events.clear()
    if tier == "storage":
        world.lose_ram()
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("restores", [True, False], ids=["restored", "not restored"])
def test_restore_after_a_clock_a_day_ahead_counts(
    world: World, clock: Clock, tier: str, *, restores: bool
) -> None:
    """Each life has another leader: one with a clock a day ahead, then one whose clock is right."""
    clock.ahead_s = DAY_S
    live(world, 1, 2, tier=tier, restores=restores)
    assert live(world, 3, tier=tier) == 2
    clock.ahead_s = 0
    assert live(world, 4, tier=tier) == 3
    assert live(world, 5, tier=tier) == 4
    assert live(world, tier=tier) == 5


def test_host_back_with_an_abandoned_chain_of_an_hour_ahead(world: World, clock: Clock) -> None:
    live(world, 7)
    clock.ahead_s = HOUR_S
    assert live(world, 8, 9) == 7
    away = Path(f"{world.ramdisk}.away")
    shutil.copytree(world.ramdisk, away)
    clock.ahead_s = 0
    assert live(world, 10, step=8) == 8
    (place,) = away.glob("*/process_*")
    place.rename(world.ramdisk / "run" / "process_00009")
    assert live(world) == 10


@pytest.mark.parametrize("restores", [True, False], ids=["restored", "not restored"])
def test_start_with_the_clock_an_hour_back_saves_what_counts(
    world: World, clock: Clock, *, restores: bool
) -> None:
    live(world, 10)
    assert live(world, 20) == 10
    clock.ahead_s = -HOUR_S
    live(world, 30, 40, restores=restores)
    clock.ahead_s = 0
    assert live(world) == 40
