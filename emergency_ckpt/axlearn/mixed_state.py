"""A state that has iterators among its arrays, as trainers keep them: taken apart, put together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.state.tree import PyTree, path_of


class MixedState(NamedTuple):
    """The two kinds of a state's leaves.

    Attributes:
      tensors: the state with a zero-size array in the place of each iterator: so a checkpoint that
        has an iterator where the state has none, or the reverse, differs in a leaf, by name.
      iterators: the iterators by "/"-joined path.
    """

    tensors: PyTree
    iterators: dict[str, Any]


def split(state: PyTree) -> MixedState:
    """Take ``state`` apart. The iterators are the same objects; nothing is copied."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    iterators: dict[str, Any] = {}
    tensors: list[object] = []
    for key_path, leaf in flat:
        if is_iterator(leaf):
            iterators[path_of(key_path)] = leaf
            tensors.append(np.empty(0, np.uint8))
        else:
            tensors.append(leaf)
    return MixedState(treedef.unflatten(tensors), iterators)


def join(state: PyTree, tensors: PyTree) -> PyTree:
    """``tensors`` in the structure of ``state``, with the iterators of ``state``."""
    flat, treedef = jax.tree_util.tree_flatten(state)
    arrays = jax.tree_util.tree_leaves(tensors)
    return treedef.unflatten(
        leaf if is_iterator(leaf) else array for leaf, array in zip(flat, arrays, strict=True)
    )


def is_iterator(leaf: object) -> bool:
    """Return True for a leaf with a state of its own, such as a data iterator."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return as_stateful(leaf) is not None
