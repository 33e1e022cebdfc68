"""A trainer's state, which has iterators among its arrays: taken apart, put together, listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.state.tree import PyTree, path_of
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.tier import DEFAULT_TIMEOUT_S

Entries = Sequence[tuple[str, Any]]
Leaves = Sequence[tuple[Any, Any]]
"""Of a state: each leaf's key path, and an ``_Array`` or what the index has in the leaf's place."""

_NAME = "index"


class _Array(NamedTuple):
    """An array without its values."""

    shape: Any
    dtype: Any


class Split(NamedTuple):
    """A state in parts: tensors, iterators by "/"-joined path, and what ``entries_of`` needs."""

    tensors: PyTree
    iterators: dict[str, Any]
    leaves: Leaves


def split(state: PyTree) -> Split:
    """Return the parts of ``state``. Nothing is copied.

    The tensors have a zero-size array in the place of each iterator: so a checkpoint that has an
    iterator where the state has none, or the reverse, differs in a leaf, by name.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    iterators: dict[str, Any] = {}
    tensors: list[object] = []
    leaves: list[tuple[Any, Any]] = []
    for key_path, leaf in flat:
        if _is_iterator(leaf):
            iterators[path_of(key_path)] = leaf
            tensors.append(np.empty(0, np.uint8))
            leaves.append((key_path, str(type(leaf))))
        else:
            tensors.append(leaf)
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            # The texts are made by ``entries_of``, since the training thread waits for this loop.
            leaves.append((key_path, _Array(leaf.shape, leaf.dtype) if is_array else leaf))
    return Split(treedef.unflatten(tensors), iterators, leaves)


def join(state: PyTree, tensors: PyTree) -> PyTree:
    """Return ``tensors`` in the structure of ``state``, with the iterators of ``state``."""
    flat, treedef = jax.tree_util.tree_flatten(state)
    arrays = jax.tree_util.tree_leaves(tensors)
    return treedef.unflatten(
        leaf if _is_iterator(leaf) else array for leaf, array in zip(flat, arrays, strict=True)
    )


def _is_iterator(leaf: object) -> bool:
    """Return True for a leaf with a state of its own, such as a data iterator."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return as_stateful(leaf) is not None


def step_name(step: int) -> str:
    """Return the folder in which axlearn's tools look for ``step``."""
    return f"step_{step:08d}"


def entries_of(step: int, leaves: Leaves) -> Entries:
    """Return the entries of the index for a state with these leaves.

    ``["step", 25]``, then ``[path, {"dtype": "float32", "shape": "(8, 16)"}]`` for each array and
    ``[path, type]`` for each iterator.
    """
    entries: list[tuple[str, Any]] = [("step", step)]
    for key_path, leaf in leaves:
        value = leaf
        if isinstance(leaf, _Array):
            dtype = getattr(leaf.dtype, "dtype", leaf.dtype)
            value = {"dtype": str(dtype), "shape": str(tuple(leaf.shape))}
        entries.append((path_of(key_path), value))
    return entries


class StepIndex:
    """The files ``step_00000025/index`` of a directory: axlearn's tools find the steps by them.

    Nothing in this package reads them: the persistent tier's own marker says what counts. Blocks
    for storage.
    """

    def __init__(self, directory: str) -> None:
        self._storage = StorageDirectory(directory, DEFAULT_TIMEOUT_S)

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
