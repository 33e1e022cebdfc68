"""Digests of a training state, independent of the processes that hold its shards."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def shard_digests(state: Any) -> dict[str, str]:
    """Return the SHA-256 of each shard of ``state`` on this process's devices, by shard name."""
    digests: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array = leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(leaf)
        for shard in array.addressable_shards:
            box = ",".join(
                f"{part.start or 0}:{size if part.stop is None else part.stop}"
                for part, size in zip(shard.index, array.shape, strict=True)
            )
            host = np.ascontiguousarray(np.asarray(shard.data))
            header = f"{host.dtype}{host.shape}".encode()
            digests[f"{name}[{box}]"] = hashlib.sha256(header + host.tobytes()).hexdigest()
    return digests


def iterator_digest(iterator_state: object) -> str:
    """Return the SHA-256 of a data iterator's state: of its JSON form, or of its bytes."""
    if isinstance(iterator_state, bytes):
        return hashlib.sha256(iterator_state).hexdigest()
    text = json.dumps(iterator_state, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
