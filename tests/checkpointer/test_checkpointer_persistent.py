"""The checkpointer with a persistent directory: lost RAM, damaged steps, storage that is down."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from world import World, finish, save_all

from emergency_ckpt.errors import InvalidState, PersistentTierError


def test_all_ram_lost(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2, 3)
        assert checkpointer.all_steps() == [2, 3]
    world.lose_ram()
    with world.open_both() as checkpointer:
        world.restores(2, host=True, by=checkpointer)
        report = checkpointer.last_restore
        assert report is not None
        assert (report.tier, report.bytes_local) == ("persistent", 0)
        assert report.bytes_persistent > 0


def _spoil_document(world: World) -> None:
    (document,) = (world.persistent / "host_state" / "4").glob("process_*.json")
    document.write_bytes(document.read_bytes()[:-20])


def _spoil_marker(world: World) -> None:
    (world.persistent / "host_state" / "4" / "marker.json").write_text("{}")


def _spoil_tensors(world: World) -> None:
    shutil.rmtree(world.persistent / "4" / "state")


def test_what_a_restore_went_back_behind_is_not_missed_later(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 3, 5)
    with world.open_both() as checkpointer:
        assert checkpointer.restore(2, state=world.state(0))[0] == 2
        save_all(checkpointer, world, 3)
        assert checkpointer.all_steps() == [2, 3]
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 3
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.rejected == ()


@pytest.mark.parametrize("spoil", [_spoil_document, _spoil_marker, _spoil_tensors])
def test_unusable_persistent_step_leads_to_the_older_one(
    world: World, spoil: Callable[[World], None]
) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    spoil(world)
    with world.open_both() as checkpointer:
        _held = world.restores(2, host=True, by=checkpointer)
        save_all(checkpointer, world, 4)
    world.lose_ram()
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 4


def test_unreadable_storage_is_an_error_only_where_it_is_needed(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 3)
    marker = world.persistent / "host_state" / "2" / "marker.json"
    marker.unlink()
    marker.mkdir()
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 3
    world.lose_ram()
    with world.open_both() as checkpointer:
        host = {"at": 0}
        with pytest.raises(PersistentTierError, match=r"marker\.json"):
            checkpointer.restore(state=world.state(0), host_state=host)
        assert host == {"at": 0}


def test_metrics_of_numpy_and_jax_are_kept_as_numbers(world: World) -> None:
    metrics = {"loss": np.float32(0.5), "top": jnp.int32(3), "each": np.array([1, 2])}
    with world.open_both() as checkpointer:
        assert checkpointer.save(step=2, state=world.state(2), metrics=metrics)
        finish(checkpointer)
        found = checkpointer.steps.describe(2).metrics
    assert found == {"loss": 0.5, "top": 3, "each": [1, 2]}


def test_metrics_that_are_no_mapping_are_refused_at_the_call(world: World) -> None:
    wrong: Any = [0.5, 3]
    with world.open_both() as checkpointer:
        with pytest.raises(InvalidState, match="metrics: a list is no mapping of names to values"):
            checkpointer.save(step=2, state=world.state(2), metrics=wrong)
        assert checkpointer.save(step=2, state=world.state(2), metrics={"loss": 0.5})


def test_metrics_too_long_for_the_log_are_refused(world: World) -> None:
    """Each version of the log has those of all steps."""
    large = {"layers": ["x" * 1000] * 66}
    with world.open_both() as checkpointer:
        with pytest.raises(InvalidState, match=r"metrics: 6\d+ bytes are too many"):
            checkpointer.save(step=2, state=world.state(2), metrics=large)
        assert not world.persistent.joinpath("2").exists()
        assert checkpointer.save(step=2, state=world.state(2), metrics={"loss": 0.5})


def test_restore_latest_is_the_newest_and_a_name_is_refused(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 3)
        assert checkpointer.restore("latest", state=world.state(0))[0] == 3
        wrong: Any = "newest"
        with pytest.raises(InvalidState, match="not the number of a step"):
            checkpointer.restore(wrong, state=world.state(0))


@pytest.mark.dear
def test_saves_leave_no_objects_behind(world: World) -> None:
    with world.open_both(save_every=1, keep_last_n=2) as checkpointer:
        counts: list[int] = []
        for steps in (range(1, 11), range(11, 31), range(31, 71)):
            save_all(checkpointer, world, *steps)
            world.events.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] < counts[1] + 20, "of 40 saves: less than one object for two"
