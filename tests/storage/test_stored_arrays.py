"""What is known of stored arrays, asked of Orbax and of TensorStore."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.storage.orbax_reader import describe_item, open_by_name

STATE = {
    "layers": [{"w": jnp.ones((8, 4), jnp.bfloat16)}, {"w": jnp.zeros((3,), jnp.int8)}],
    "count": jnp.int32(7),
    "rate": 0.5,
}


def soon() -> float:
    return time.monotonic() + 60


def _saved(directory: Path, state: Any = STATE) -> epath.Path:
    with ocp.CheckpointManager(directory) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return epath.Path(directory) / "1" / "default"


def test_arrays_opened_by_name_are_as_orbax_describes_them(tmp_path: Path) -> None:
    item = _saved(tmp_path)
    described = describe_item(item)
    assert set(described) == {"layers/0/w", "layers/1/w", "count", "rate"}
    assert open_by_name(item, described, soon()) == described


def test_array_that_is_not_under_its_name_leaves_answer_to_orbax(tmp_path: Path) -> None:
    assert open_by_name(_saved(tmp_path), ["layers/0/w", "layers/2/w"], soon()) is None


def test_leaves_that_would_have_one_name_leave_answer_to_orbax(tmp_path: Path) -> None:
    item = _saved(tmp_path, {"a.b": jnp.zeros(4), "c": jnp.ones(4)})
    assert open_by_name(item, ["a/b", "a.b"], soon()) is None
