"""Reads a step with plain Orbax, in an interpreter that never heard of this package."""

from __future__ import annotations

import importlib.abc
import json
import sys


class Refuse(importlib.abc.MetaPathFinder):
    """Nothing of the package may be imported, not even by a plugin."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "emergency_ckpt":
            raise ImportError(f"{name} is not to be known here")


sys.meta_path.insert(0, Refuse())

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from etils import epath  # noqa: E402

DIRECTORY, STEP = sys.argv[1], int(sys.argv[2])


def expected(number: int) -> np.ndarray:
    return np.random.default_rng([STEP, number]).integers(0, 2**32, (128, 1024), np.uint32)


def right(state: dict[str, object]) -> bool:
    return all(np.array_equal(state[f"big{n}"], expected(n)) for n in range(6))


# Orbax asks for a target where the devices are not those of the save.
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
item = epath.Path(DIRECTORY) / str(STEP) / "state"
checkpointer = ocp.StandardCheckpointer()
metadata = checkpointer.metadata(item).item_metadata.tree
target = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), metadata)
by_checkpointer = checkpointer.restore(item, target)
with ocp.CheckpointManager(DIRECTORY) as manager:
    steps = list(manager.all_steps())
    args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    by_manager = manager.restore(STEP, args=args).state
print(
    json.dumps(
        {
            "steps": steps,
            "manager": right(by_manager),
            "checkpointer": right(by_checkpointer),
            "leaves": sorted(by_manager),
            "count": int(np.asarray(by_manager["host"]["count"])),
        }
    )
)
