"""A start that saves without a restore, in a run that has steps: said once, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from faults import copies_to_slots_fail, host_states_are_too_large, storage_fails
from ledgers import ledger_in
from world import World, logged, same, save, save_all

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import PersistentTierError


def saved(world: World, *steps: int, restores: bool = False, **settings: Any) -> None:
    with world.open(**settings) as ckpt:
        if restores:
            ckpt.restore(state=world.state(0))
        save_all(ckpt, world, *steps)


def restored(world: World, step: int | None = None, **settings: Any) -> int | None:
    with world.open(**settings) as ckpt:
        found, state = ckpt.restore(step, state=world.state(0))
        assert found is None or same(state, world.state(found))
        return found


def both(world: World) -> dict[str, Any]:
    return {"dir": str(world.persistent), "save_every": 1}


def held(world: World) -> list[int]:
    """The steps whose slots are published."""
    files = [json.loads(path.read_bytes()) for path in world.ramdisk.rglob("slot_*.manifest.json")]
    return sorted(file["manifest"]["contents"]["save"]["step"] for file in files)


def said(world: World) -> list[object]:
    """The newest step that each start left behind which said so."""
    return [e.fields["newest"] for e in world.named("warning", cause="without_restore")]


def test_next_restore_takes_the_new_life_and_the_old_by_number(world: World) -> None:
    """With two slots."""
    saved(world, 99, 100)
    saved(world, 5)
    with world.open() as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 5
        assert ckpt.latest_step() == 5
        world.restores(100, asked=100, by=ckpt)


def test_old_step_by_number_goes_on_from_there(world: World) -> None:
    saved(world, 99, 100)
    saved(world, 5)
    with world.open() as ckpt:
        assert ckpt.restore(100, state=world.state(0))[0] == 100
        save_all(ckpt, world, 101)
    assert restored(world) == 101
    assert said(world) == [100]


def test_step_left_behind_is_overwritten_first(world: World) -> None:
    saved(world, 100, local_keep_last_n=2)
    saved(world, 5, 6, local_keep_last_n=2)
    assert restored(world, 100, local_keep_last_n=2) == 100


def test_lost_log_and_ram_leave_the_new_life_newest(world: World) -> None:
    """The markers of steps 2 and 4 name later lives than a job without any record would begin."""
    for steps in ((2,), (4,)):
        saved(world, *steps, restores=True, **both(world))
    shutil.rmtree(world.persistent / "host_state" / "log")
    world.lose_ram()
    saved(world, 1, 2, **both(world))
    assert said(world) == [4]
    world.lose_ram()
    assert restored(world, **both(world)) == 2
    assert restored(world, 4, **both(world)) == 4


@pytest.mark.parametrize("steps", [(5, 6), (5, 6, 7)])
def test_slots_are_for_the_new_life_when_it_needs_them(
    world: World, steps: tuple[int, ...]
) -> None:
    saved(world, 99, 100)
    saved(world, *steps)
    assert held(world) == list(steps[-2:])
    assert restored(world) == steps[-1]


def test_restore_of_its_own_older_step_keeps_the_one_left_behind(world: World) -> None:
    saved(world, 100, local_keep_last_n=3)
    saved(world, 5, 6, local_keep_last_n=3)
    with world.open(local_keep_last_n=3) as ckpt:
        assert ckpt.restore(5, state=world.state(0))[0] == 5
        save_all(ckpt, world, 6)
    assert restored(world, local_keep_last_n=3) == 6
    assert restored(world, 100, local_keep_last_n=3) == 100


def test_start_without_restore_says_so_once(world: World) -> None:
    saved(world, 100)
    with logged() as lines:
        saved(world, 5, 6, 7)
    assert said(world) == [100]
    (line,) = [line for line in lines if "without a restore" in line]
    assert line.startswith("step 5 is saved without a restore, in a run that has steps up to 100:")
    saved(world, 1)
    assert said(world) == [100, 7]


def test_fresh_start_says_nothing(world: World) -> None:
    saved(world, 1)
    world.lose_ram()
    saved(world, 1, 2, restores=True)
    saved(world, 3, restores=True)
    with world.open() as ckpt:
        ckpt.go_on_after(ckpt.steps.survey(world.state(0)))
        save_all(ckpt, world, 4)
    assert said(world) == []
    assert restored(world) == 4


def test_saves_that_are_never_whole_leave_nothing_behind(world: World) -> None:
    """The host state is too large, so each save of the new start fails."""
    saved(world, 99, 100)
    with world.open() as ckpt, host_states_are_too_large():
        ckpt.save(step=5, state=world.state(5), host_state={"at": 5})
        ckpt.wait_until_finished()
        assert ckpt.failed_saves == 1
    assert said(world) == [100]
    assert restored(world) == 100


def test_host_that_was_away_brings_back_what_was_left_behind(world: World) -> None:
    saved(world, 99, 100)
    away = Path(f"{world.ramdisk}.away")
    shutil.copytree(world.ramdisk, away)
    saved(world, 5, 6)
    (place,) = away.glob("*/process_*")
    place.rename(world.ramdisk / "run" / "process_00009")
    assert restored(world) == 6


def test_ledger_has_the_life_from_its_start(world: World) -> None:
    with world.open():
        (path,) = world.ramdisk.rglob("ledger.json")
        first = ledger_in(path)
        assert first["incarnation"].startswith("000000000001-")
        assert (first["chain"], first["complete"]) == (None, None)
    saved(world, 1)
    assert ledger_in(path)["incarnation"].startswith("000000000002-")
    assert ledger_in(path)["complete"]["step"] == 1


def test_start_anew_of_a_run_on_record_warns_once(world: World) -> None:
    """A life without a save, or whose RAM is gone, leaves its number in storage."""
    told: list[int] = []
    for _ in range(3):
        with world.open_both(save_every=1000, local_save_every=1000) as ckpt:
            for _ in range(2):
                assert ckpt.restore(state=world.state(0)) == (None, ANY)
        world.lose_ram()
        warnings = [e.fields["text"] for e in world.named("warning", cause="setting")]
        told.append(len(warnings))
    assert told == [0, 1, 2]
    begin = "training begins anew although run run has been started before (its lives up to 1 are"
    assert warnings[0].startswith(begin)
    assert f"no step of it is in RAM or in {world.persistent}. " in warnings[0]


def warned(world: World) -> list[str]:
    return [
        e.fields["text"]
        for e in world.named("warning", cause="setting")
        if "begins anew" in e.fields["text"]
    ]


def test_start_that_asks_for_no_restore_warns_as_well(world: World) -> None:
    for told in (0, 1, 2):
        with world.open_both(save_every=1000, local_save_every=1000) as ckpt:
            for step in (1, 2):
                save(ckpt, world, step)
            assert warned(world) == []
            with pytest.MonkeyPatch.context() as patch:
                storage_fails(patch, "finish")
                copies_to_slots_fail(patch)
                save(ckpt, world, 3, force=True)
                ckpt.wait_until_finished()
            assert len(warned(world)) == min(told, 1)
            ckpt.stop(after_error=True)
        world.lose_ram()
        world.events.clear()


@contextlib.contextmanager
def storage_away(world: World) -> Iterator[None]:
    """Inside, a file has the place of the directory."""
    away = Path(f"{world.persistent}.away")
    if world.persistent.exists():
        world.persistent.rename(away)
    world.persistent.touch()
    try:
        yield
    finally:
        world.persistent.unlink()
        if away.exists():
            away.rename(world.persistent)


def saved_in_two_lives(world: World) -> None:
    saved(world, 76, **both(world))
    saved(world, 77, restores=True, local_save_every=0, **both(world))


@contextlib.contextmanager
def refused(world: World, step: int, **settings: Any) -> Iterator[EmergencyCheckpointer]:
    """Inside, a life whose save of ``step`` was refused."""
    with contextlib.ExitStack() as stack:
        ckpt = stack.enter_context(world.open(**{**both(world), **settings}))
        with pytest.raises(PersistentTierError, match=f"step {step}: .*restore before the first"):
            save(ckpt, world, step)
        with pytest.raises(PersistentTierError):
            ckpt.check_for_errors()  # of the start
        yield ckpt


def test_life_that_cannot_know_earlier_ones_restores_first(world: World) -> None:
    """Its steps would not count beside those of storage, whose lives have greater numbers."""
    saved_in_two_lives(world)
    world.lose_ram()
    with contextlib.ExitStack() as stack:
        with storage_away(world):
            ckpt = stack.enter_context(refused(world, 100))
            assert held(world) == []
        assert ckpt.restore(state=world.state(0))[0] == 77
        save_all(ckpt, world, 102)
    assert restored(world, **both(world)) == 102


def test_life_after_a_refused_one_is_refused_too(world: World) -> None:
    """What a refused life leaves in RAM is no knowledge of the run."""
    saved_in_two_lives(world)
    world.lose_ram()
    with storage_away(world):
        for step in (100, 101):
            with refused(world, step):
                pass
    assert restored(world, **both(world)) == 77


def test_life_beside_a_directory_that_cannot_be_made_is_refused(world: World) -> None:
    """As below a mount point that the job may not write to. The directory is absent there."""
    with refused(world, 100, dir="/proc/eckpt-none/persistent"):
        pass


def test_restore_of_nothing_leaves_the_refusal(world: World) -> None:
    """This life has a number that an earlier life may have."""
    for _ in range(3):
        with world.open(**both(world)):
            pass
    world.lose_ram()
    with contextlib.ExitStack() as stack:
        with storage_away(world):
            ckpt = stack.enter_context(refused(world, 1))
        assert ckpt.restore(state=world.state(0))[0] is None
        with pytest.raises(PersistentTierError, match="start again once storage answers"):
            save(ckpt, world, 1)
    saved(world, 1, restores=True, **both(world))
    assert restored(world, **both(world)) == 1


def test_notice_in_a_life_that_is_refused_ends_it_as_preempted(world: World) -> None:
    with storage_away(world):
        with world.open(**both(world), on_preemption="exit", preemption_grace_s=5.0) as ckpt:
            ckpt.request_preemption()
            with pytest.raises(SystemExit) as end:
                save(ckpt, world, 100)
            ckpt.stop(after_error=True)
        assert end.value.code == 143
    assert held(world) == []
