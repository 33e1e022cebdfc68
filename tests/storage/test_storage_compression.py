"""Compression of the arrays in storage: as configured, and steps of either kind are restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from world import World, save_all


def compressor(step: Path) -> Any:
    """The compressor in the metadata of the array ``w``."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{step}/state", "path": "w"},
    }
    return tensorstore.open(spec, open=True).result().spec().to_json()["metadata"]["compressor"]


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, None), ({"storage_compression": "zstd"}, "zstd")]
)
def test_arrays_in_storage_have_the_compressor_set(
    world: World, settings: dict[str, Any], expected: str | None
) -> None:
    with world.open_both(**settings) as checkpointer:
        save_all(checkpointer, world, 1, 2)
    found = compressor(world.persistent / "2")
    assert (found and found["id"]) == expected
    plain = ocp.PyTreeCheckpointer().restore(world.persistent / "2" / "state")
    np.testing.assert_array_equal(plain["w"], np.asarray(world.state(2)["w"]))


@pytest.mark.parametrize("kinds", [("none", "zstd"), ("zstd", "none")])
def test_step_of_other_compression_is_restored_and_followed(
    world: World, kinds: tuple[str, str]
) -> None:
    before, now = kinds
    with world.open_both(storage_compression=before) as checkpointer:
        save_all(checkpointer, world, 1, 2)
    world.lose_ram()
    with world.open_both(storage_compression=now) as checkpointer:
        _held = world.restores(2, host=True, by=checkpointer)
        save_all(checkpointer, world, 3, 4)
    world.lose_ram()
    world.restores(4, host=True, storage_compression=before)
