"""Steps under the item names of the caller: who writes, and who reads them, on another mesh too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbaxs

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt import orbax as emergency
from emergency_ckpt.config import OrbaxFace
from emergency_ckpt.maxtext import from_maxtext
from emergency_ckpt.orbax import checkpoint as plain

DEVICES = np.array(jax.devices())
MESHES = [
    jax.sharding.Mesh(DEVICES.reshape(shape), ("slice", "fsdp")) for shape in ((2, 4), (4, 2))
]


def state_on(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    return {
        "w": jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), split),
        "b": jax.device_put(np.arange(8, dtype=np.int8), split),
    }


def specs_on(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_on(mesh)
    )


def assert_is_state(found: Any, mesh: jax.sharding.Mesh) -> None:
    state = state_on(mesh)
    for name in state:
        assert np.array_equal(found[name], state[name])
        assert found[name].sharding == state[name].sharding


def ours(tmp_path: Path, mesh: jax.sharding.Mesh, **settings: Any) -> EmergencyCheckpointer:
    settings = {"save_every": 1, **settings}
    directory, ramdisk = str(tmp_path / "run"), str(tmp_path / "ram")
    return EmergencyCheckpointer(dir=directory, local_dir=ramdisk, mesh=mesh, **settings)


def save(checkpointer: EmergencyCheckpointer, mesh: jax.sharding.Mesh) -> None:
    with checkpointer:
        checkpointer.save(step=1, state=state_on(mesh))
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()


@pytest.mark.parametrize("mesh", MESHES)
def test_orbax_v1_loads_a_step_of_ours(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    save(ours(tmp_path, MESHES[0]), MESHES[0])
    assert_is_state(v1.load(str(tmp_path / "run" / "1"), specs_on(mesh)), mesh)
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert_is_state(checkpointer.load(1, specs_on(mesh)), mesh)


@pytest.mark.dear
@pytest.mark.parametrize("mesh", MESHES)
def test_step_of_orbax_v1_is_restored(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state_on(MESHES[0]))
    with ours(tmp_path, mesh) as checkpointer:
        step, found = checkpointer.restore(state=specs_on(mesh))
    assert step == 1
    assert_is_state(found, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("item", ["state", "items", "default", "train_state"])
def test_plain_orbax_finds_the_item_by_its_name(
    tmp_path: Path, item: str, mesh: jax.sharding.Mesh
) -> None:
    save(ours(tmp_path, MESHES[0], orbax=OrbaxFace(item=item)), MESHES[0])
    with ocp.CheckpointManager(tmp_path / "run", item_names=(item,)) as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(specs_on(mesh))})
        assert_is_state(manager.restore(1, args=args)[item], mesh)
    with ours(tmp_path, mesh) as checkpointer:  # whatever the name was
        assert_is_state(checkpointer.restore(state=specs_on(mesh))[1], mesh)


def test_maxtext_settings_write_the_item_of_maxtext() -> None:
    assert from_maxtext({}).orbax.item == "items"


SHAPES = ((2, 4), (4, 2)), ((2, 4), (2, 4)), ((1, 8), (1, 8)), ((1, 8), (1, 4))
"""The mesh of the save, with several slices or one, and that of the restore."""


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    devices = DEVICES[: shape[0] * shape[1]].reshape(shape)
    return jax.sharding.Mesh(devices, ("slice", "fsdp"))


def emergency_manager(module: Any, tmp_path: Path, mesh: jax.sharding.Mesh) -> Any:
    """Return the manager of ``module``, Orbax's or ours, with its RAM in a folder of its name."""
    directories = tmp_path / module.__name__, tmp_path / "run"
    for each in directories:
        each.mkdir(exist_ok=True)
    persistent = module.PersistentCheckpointOptions(save_interval_steps=1)
    options = module.CheckpointManagerOptions(persistent=persistent)
    return module.CheckpointManager(*directories, mesh, specs_on(mesh), options=options)


@pytest.mark.dear
@pytest.mark.parametrize(("saved_on", "restored_on"), SHAPES)
@pytest.mark.parametrize("modules", [(emergency, orbaxs), (orbaxs, emergency)])
def test_emergency_managers_read_each_others_steps(
    tmp_path: Path, modules: tuple[Any, Any], saved_on: tuple[int, int], restored_on: Any
) -> None:
    mesh, other = mesh_of(saved_on), mesh_of(restored_on)
    with emergency_manager(modules[0], tmp_path, mesh) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state_on(mesh))))
        manager.wait_until_finished()
    item = "default" if saved_on[0] > 1 else "state"  # as Orbax's names it
    assert (tmp_path / "run" / "1" / item / "_METADATA").exists()
    with emergency_manager(modules[1], tmp_path, other) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(specs_on(other)))
        assert_is_state(manager.restore(1, args=args).state, other)


def several(mesh: jax.sharding.Mesh, arguments: Any) -> ocp.args.Composite:
    """Return the arguments of two items: dicts of the leaves ``w`` and ``b``, and ``b`` alone."""
    state = state_on(mesh)
    return ocp.args.Composite(params=arguments(state), opt=arguments({"b": state["b"]}))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("modules", [(plain, ocp), (ocp, plain)])
def test_several_items_are_read_by_both(
    tmp_path: Path, modules: tuple[Any, Any], mesh: jax.sharding.Mesh
) -> None:
    with manager_of(modules[0], tmp_path) as manager:
        manager.save(1, args=several(MESHES[0], ocp.args.PyTreeSave))
        manager.wait_until_finished()
    items = {path.name for path in (tmp_path / "run" / "1").iterdir() if path.is_dir()}
    assert items == {"params", "opt"}
    with manager_of(modules[1], tmp_path) as manager:
        found = manager.restore(1, args=several(mesh, ocp.args.StandardRestore))
    assert_is_state(found.params, mesh)
    assert_is_state({**state_on(mesh), **found.opt}, mesh)
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        loaded = checkpointer.load_checkpointables(1)
    assert np.array_equal(loaded["opt"]["b"], state_on(mesh)["b"])


def manager_of(module: Any, tmp_path: Path) -> Any:
    """Return the plain manager of ``module``, Orbax's or ours."""
    given = {"local_directory": tmp_path / "ram"} if module is plain else {}
    return module.CheckpointManager(
        tmp_path / "run", options=module.CheckpointManagerOptions(**given)
    )
