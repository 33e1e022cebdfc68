"""Arrays in storage are written without compression, and plain Orbax reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from world import World, save_all


def compressor(step: Path) -> Any:
    """The compressor in the metadata of the array ``w``."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{step}/state", "path": "w"},
    }
    return tensorstore.open(spec, open=True).result().spec().to_json()["metadata"]["compressor"]


def test_arrays_in_storage_are_not_compressed(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2)
    assert compressor(world.persistent / "2") is None
    plain = ocp.PyTreeCheckpointer().restore(world.persistent / "2" / "state")
    np.testing.assert_array_equal(plain["w"], np.asarray(world.state(2)["w"]))
