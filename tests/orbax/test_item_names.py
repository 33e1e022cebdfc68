"""Steps under the item names of the caller: who writes, and who reads them, on another mesh too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt import orbax as emergency
from emergency_ckpt.maxtext import from_maxtext

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
    save(ours(tmp_path, MESHES[0], orbax_item=item), MESHES[0])
    with ocp.CheckpointManager(tmp_path / "run", item_names=(item,)) as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(specs_on(mesh))})
        assert_is_state(manager.restore(1, args=args)[item], mesh)
    with ours(tmp_path, mesh) as checkpointer:  # whatever the name was
        assert_is_state(checkpointer.restore(state=specs_on(mesh))[1], mesh)


def test_maxtext_settings_write_the_item_of_maxtext() -> None:
    assert from_maxtext({}).orbax_item == "items"


@pytest.mark.parametrize(("shape", "item"), [((2, 4), "default"), ((1, 8), "state")])
def test_emergency_manager_writes_the_item_of_orbaxs(
    tmp_path: Path, shape: tuple[int, int], item: str
) -> None:
    """Orbax's writes and reads ``default`` with several slices, and ``state`` with one."""
    mesh = jax.sharding.Mesh(DEVICES.reshape(shape), ("slice", "fsdp"))
    (tmp_path / "ram").mkdir()
    options = emergency.CheckpointManagerOptions(
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1)
    )
    directories = tmp_path / "ram", tmp_path / "run"
    with emergency.CheckpointManager(
        *directories, mesh, specs_on(mesh), options=options
    ) as manager:
        manager.save(1, ocp.args.Composite(state=ocp.args.PyTreeSave(state_on(mesh))))
    assert (tmp_path / "run" / "1" / item / "_METADATA").exists()
