"""Orbax's CheckpointManager with a ``gs://`` directory."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath


def _state(step: int) -> dict[str, object]:
    random = np.random.default_rng(step)  # bytes that do not compress
    return {
        "kernel": jax.numpy.asarray(random.normal(size=(30, 100)), jax.numpy.float32),
        "scale": jax.numpy.full((7,), step, jax.numpy.bfloat16),
        "count": jax.numpy.asarray(step, jax.numpy.int32),
    }


def save_steps(directory: str, steps: list[int]) -> list[int]:
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
        manager.wait_until_finished()
        return sorted(manager.all_steps())


def restore_newest(directory: str) -> list[object]:
    with ocp.CheckpointManager(directory) as manager:
        step = manager.latest_step()
        state = manager.restore(step, args=ocp.args.StandardRestore(_state(0)))
    equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), state, _state(step))
    return [step, all(jax.tree.leaves(equal))]


def epath_work(directory: str) -> dict[str, object]:
    """What Orbax and our own persistent tier do with epath beside the arrays."""
    top = epath.Path(directory)
    (top / "sub").mkdir(parents=True)
    (top / "sub" / "marker.json").write_text("{}")
    (top / "empty").write_bytes(b"")
    return {
        "exists": [top.exists(), (top / "sub").is_dir(), (top / "none").exists()],
        "children": sorted(path.name for path in top.iterdir()),
        "text": (top / "sub" / "marker.json").read_text(),
        "size": (top / "empty").stat().length,
    }
