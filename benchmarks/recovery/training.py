"""The demo's model as the workers train it: its state as contenders keep it, and its batches."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.demo import model

SEQUENCES_PER_DEVICE = 8


def described(config: model.ModelConfig, mesh: Mesh) -> Any:
    """Return the state to keep, as ``jax.ShapeDtypeStruct``.

    The key is kept as numbers: Orbax's emergency manager restores no typed PRNG key.
    """
    abstract = model.abstract_state(config, mesh)
    key = jax.eval_shape(jax.random.key_data, abstract["key"])
    replicated = NamedSharding(mesh, PartitionSpec())
    numbers = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
    return {**abstract, "key": numbers}


def to_keep(state: Any) -> Any:
    """Return ``state`` with its key as numbers."""
    return {**state, "key": jax.random.key_data(state["key"])}


def to_train(state: Any) -> Any:
    """Return a state that was kept with its key as a key."""
    return {**state, "key": jax.random.wrap_key_data(state["key"])}


def batch(config: model.ModelConfig, mesh: Mesh, devices: int, step: int) -> Any:
    """Return the batch of ``step`` for so many ``devices`` of this process, the same each time."""
    shape = (SEQUENCES_PER_DEVICE * devices, config.sequence_length + 1)
    return model.global_batch(mesh, np.full(shape, step % 256, np.uint8))
