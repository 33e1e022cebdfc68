"""``args`` about the state are followed or refused, and unsaved parts are named."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from world import World

from emergency_ckpt import orbax as emergency

Composite = ocp.args.Composite


def abstract(world: World) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, world.state(0))


def manager_of(
    world: World, mesh: Mesh | None = None, **options: Any
) -> emergency.CheckpointManager:
    world.ramdisk.mkdir(exist_ok=True)
    local = emergency.LocalCheckpointOptions(save_interval_steps=1)
    options = emergency.CheckpointManagerOptions(**{"local": local, **options})
    mesh = mesh or world.mesh
    return emergency.CheckpointManager(
        world.ramdisk, world.persistent, mesh, abstract(world), options=options
    )


@pytest.fixture
def saved(world: World) -> emergency.CheckpointManager:
    manager = manager_of(world)
    manager.save(3, Composite(state=ocp.args.PyTreeSave(world.state(3))))
    manager.wait_until_finished()
    yield manager
    manager.close()


def partly(item: Any, **more: Any) -> Any:
    return Composite(state=ocp.args.PyTreeRestore(item=item, partial_restore=True, **more))


def test_partial_restore_of_a_part_gives_that_part(
    world: World, saved: emergency.CheckpointManager
) -> None:
    elsewhere = NamedSharding(world.mesh, P(None, "fsdp"))
    item = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=elsewhere)}
    found = saved.restore(3, partly(item)).state
    assert set(found) == {"w"}
    assert found["w"].sharding == elsewhere
    assert np.array_equal(found["w"], world.state(3)["w"])


def test_partial_restore_of_all_gives_all(world: World, saved: emergency.CheckpointManager) -> None:
    found = saved.restore(3, partly(abstract(world))).state
    assert set(found) == set(world.state(3))


@pytest.mark.parametrize(
    "item",
    [{"w": jax.ShapeDtypeStruct((4, 4), np.float32)}, {"new": np.zeros(3)}],
    ids=["shape", "name"],
)
def test_partial_restore_of_what_is_not_there_is_refused(
    saved: emergency.CheckpointManager, item: Any
) -> None:
    with pytest.raises(ValueError, match="partial_restore: 1 leaves of item"):
        saved.restore(3, partly(item))


def test_restore_with_transforms_is_refused(saved: emergency.CheckpointManager) -> None:
    args = Composite(state=ocp.args.PyTreeRestore(transforms={"w": ocp.Transform()}))
    with pytest.raises(ValueError, match="transforms is not supported"):
        saved.restore(3, args)


ONE_SLICE = Mesh(np.array(jax.devices()).reshape(1, 8), ("slice", "fsdp"))


@pytest.mark.parametrize(
    ("local", "warned"),
    [({}, True), ({"with_one_slice": True}, False), ({"read_only": True}, False)],
)
def test_manager_of_one_slice_says_that_ram_is_off(
    world: World, caplog: pytest.LogCaptureFixture, local: dict[str, Any], warned: bool
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        manager_of(world, ONE_SLICE, local=emergency.LocalCheckpointOptions(**local)),
    ):
        assert ("nothing is saved to RAM" in caplog.text) == warned
        assert ("No axis of {'fsdp': 8} over several hosts" in caplog.text) == warned
        assert ("The setting local_save_every" in caplog.text) == warned


def _save(manager: emergency.CheckpointManager, world: World, *steps: int) -> list[bool]:
    started: list[bool] = []
    for step in steps:
        state = Composite(state=ocp.args.PyTreeSave(world.state(step)))
        started.append(manager.save(step, state, metrics={"loss": step}))
        manager.wait_until_finished()
    return started


def test_reload_after_an_older_restore_lets_newer_steps_be_saved(world: World) -> None:
    with manager_of(world, settings={"save_every": 2}) as manager:
        assert _save(manager, world, 1, 2, 3, 4, 5, 6) == [True] * 6
        manager.restore(2)
        manager.reload()
        assert manager.latest_step() == 6
        assert _save(manager, world, 3, 4, 5) == [True] * 3
        assert manager.latest_step() == 5
        assert manager.all_steps() == [2, 4, 5]
        manager.delete(5)
        assert manager.latest_step() == 4


@pytest.mark.parametrize("restored", [None, 2, 6])
def test_latest_step_after_its_removal_is_an_older_one(world: World, restored: int | None) -> None:
    with manager_of(world, settings={"save_every": 1}) as manager:
        assert _save(manager, world, 2, 5, 6) == [True] * 3
        if restored is not None:
            manager.restore(restored)
            manager.reload()
        manager.delete(6)
        assert manager.latest_step() == 5


def test_best_step_leaves_out_a_step_whose_document_is_damaged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"local_save_every": 0, "save_every": 1}
    with manager_of(world, settings=settings, best_fn=lambda found: found["loss"]) as manager:
        assert _save(manager, world, 1, 2, 3) == [True] * 3
        damaged = world.persistent / "host_state" / "3" / "process_00000_of_00001.json"
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        with caplog.at_level(logging.WARNING):
            assert manager.best_step() == 2
        assert "step 3" in caplog.text
