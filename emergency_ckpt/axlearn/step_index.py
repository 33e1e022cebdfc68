"""``<dir>/step_00000025/index``: how axlearn's tools find the steps of a directory, and what is in
them. Nothing in this package reads it: what counts is said by the persistent tier's own marker.

A JSON list of pairs: ``["step", 25]``, then ``[path, {"dtype": "float32", "shape": "(8, 16)"}]``
for each array and ``[path, type]`` for each iterator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax

from emergency_ckpt.axlearn.mixed_state import is_iterator
from emergency_ckpt.state.tree import PyTree, path_of
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.tier import DEFAULT_TIMEOUT_S

Entries = Sequence[tuple[str, Any]]

_NAME = "index"


def step_name(step: int) -> str:
    """Return the folder in which axlearn's tools look for ``step``."""
    return f"step_{step:08d}"


def entries_of(step: int, state: PyTree) -> Entries:
    """Return the entries of the index for ``state``."""
    entries: list[tuple[str, Any]] = [("step", step)]
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        path = path_of(key_path)
        if is_iterator(leaf):
            entries.append((path, str(type(leaf))))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            dtype = getattr(leaf.dtype, "dtype", leaf.dtype)
            entries.append((path, {"dtype": str(dtype), "shape": str(tuple(leaf.shape))}))
        else:
            entries.append((path, leaf))
    return entries


class StepIndex:
    """The index files of one directory. Blocks for storage, at most ``timeout_s`` a call."""

    def __init__(self, directory: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._storage = StorageDirectory(directory, timeout_s)

    def write(self, step: int, entries: Entries) -> None:
        """Write the index of ``step``, all of it or nothing. PersistentTierError."""
        data = json.dumps(list(entries)).encode()
        self._storage.create_folder(step_name(step))
        self._storage.put(f"{step_name(step)}/{_NAME}", data)

    def remove(self, step: int) -> None:
        """Remove the index of ``step``, if it has one. PersistentTierError."""
        path = self._storage.path / step_name(step)

        def clear() -> None:
            (path / _NAME).unlink(missing_ok=True)
            if path.exists():
                path.rmtree()

        self._storage.do("remove", f"/{path.name}", clear)
