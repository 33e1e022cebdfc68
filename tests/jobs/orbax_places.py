"""Managers of Orbax's kind to test: their states, directories, and what befalls them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess

from emergency_ckpt import orbax as emergency

SETTINGS = {"total_timeout_s": 90.0}


class EmptyNode(NamedTuple):
    """A node without leaves, as optimizers have them."""


def mesh_with(axis: int, *, swapped: bool = False, dimensions: int = 2) -> Mesh:
    """Replicas along ``axis``; the last of the other axes is "data"."""
    shape = (2, 4) if dimensions == 2 else (2, 2, 2)
    devices = np.array(jax.devices()).reshape(shape)
    names = ["data"] if dimensions == 2 else ["model", "data"]
    names.insert(axis, "replica")
    return Mesh(np.moveaxis(devices[::-1] if swapped else devices, 0, axis), names)


def state_at(step: int, mesh: Mesh) -> dict[str, Any]:
    def put(value: Any, *spec: Any) -> jax.Array:
        whole = np.asarray(value)
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return {
        "replicated": put(np.arange(8, dtype=np.int32) + step),
        "sharded": put(np.arange(16, dtype=np.float32) * step, "data"),
        "small": put((np.arange(8) - step).astype(np.int8), "data"),
        "flags": put(np.arange(8) % 3 == step % 3, "data"),
        "zeros": put(np.array([-0.0, 0.0] * 4, np.float32)),
        "none": put(np.zeros((0, 3), np.float32)),
        "count": put(np.int32(step)),
        "empty_dict": {},
        "empty_node": EmptyNode(),
    }


def abstract(mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0, mesh)
    )


def differences(state: Any, step: int, mesh: Mesh) -> list[str]:
    wanted = state_at(step, mesh)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    return [
        name
        for name, right in wanted.items()
        if isinstance(right, jax.Array)
        and not (
            state[name].sharding == right.sharding
            and state[name].dtype == right.dtype
            and [np.asarray(s.data).tobytes() for s in state[name].addressable_shards]
            == [np.asarray(s.data).tobytes() for s in right.addressable_shards]
        )
    ]


@dataclasses.dataclass
class Place:
    """The directories of one case: RAM per host, one persistent."""

    world: JobProcess
    name: str

    @property
    def ramdisk(self) -> Path:
        return self.world.ramdisk(self.name)

    @property
    def persistent(self) -> Path:
        return self.world.root / f"{self.name}_persistent"

    def open(
        self,
        mesh: Mesh,
        local: dict[str, Any] | None = None,
        persistent: dict[str, Any] | None = None,
        **options: Any,
    ) -> emergency.CheckpointManager:
        self.ramdisk.mkdir(parents=True, exist_ok=True)
        return emergency.CheckpointManager(
            self.ramdisk,
            self.persistent,
            mesh,
            abstract(mesh),
            options=emergency.CheckpointManagerOptions(
                local=emergency.LocalCheckpointOptions(**(local or {})),
                persistent=emergency.PersistentCheckpointOptions(**(persistent or {})),
                settings=SETTINGS,
                **options,
            ),
        )

    def lose_ram(self, processes: Sequence[int]) -> None:
        """What was in the local directories of these processes is deleted under the manager."""
        self.world.meet()
        if self.world.process in processes:
            empty(self.ramdisk)
        self.world.meet()

    def lose_storage(self) -> None:
        self.world.meet()
        if self.world.process == 0:
            empty(self.persistent)
        self.world.meet()


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path)


def saved(step: int, mesh: Mesh, **items: Any) -> ocp.args.Composite:
    return ocp.args.Composite(state=ocp.args.PyTreeSave(state_at(step, mesh)), **items)


def save_up_to(manager: emergency.CheckpointManager, total: int, *, waits: bool = True) -> None:
    for step in range(total):
        manager.save(step, saved(step, manager.global_mesh))
        if waits:
            manager.wait_until_finished()
    manager.wait_until_finished()
