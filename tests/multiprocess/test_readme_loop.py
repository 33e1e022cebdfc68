"""The README's loop of one's own, run as it stands there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import grain_data
import jax
import jax.numpy as jnp
import numpy as np
from readme_blocks import readme_block


def train(root: Path, last_step: int) -> dict[str, Any]:
    """Run the loop; what its names stand for at the end."""
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("slice", "fsdp"))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))

    def step_of(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        return {"w": state["w"] * 0.9 + jnp.sum(batch)}

    names: dict[str, Any] = {
        "mesh": mesh,
        "state": {"w": jax.device_put(jnp.zeros(8), sharded)},
        "data": iter(grain_data.dataset(4, 0, 1)),
        "train_step": jax.jit(step_of, donate_argnums=0),
        "last_step": last_step,
    }
    lines = readme_block("loop")
    lines = lines.replace("/mnt/checkpoints/run7", str(root / "persistent"))
    exec(lines.replace("/dev/shm/eckpt", str(root / "ram")), names)
    return names


def test_a_second_run_goes_on_as_if_there_had_been_one() -> None:
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    try:
        whole = train(root / "whole", 34)
        first = train(root / "twice", 25)
        second = train(root / "twice", 34)
    finally:
        shutil.rmtree(root)
    assert first["ckpt"].last_restore is None
    assert second["ckpt"].last_restore.step == 20
    assert np.array_equal(second["state"]["w"], whole["state"]["w"])
    assert np.array_equal(next(second["data"]), next(whole["data"]))
