"""Checks, at each save, that a state still has the structure that a plan was made for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import (
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    is_key_type,
    is_python_number,
)

_PLACED = attrgetter("aval", "sharding")
"""All by which an array's leaf may differ: its type for JAX, with shape and dtype, and its place.

Both in one visit of the leaf, because each visit takes a third of a microsecond. The dtype of keys
names their implementation.
"""


class StateStructure:
    """Finds the leaves of states like ``tree``. For one thread.

    A training step returns new arrays with the shardings, shapes and dtypes of the step before, as
    the very same objects, so these are compared as one list: equal objects are equal without a
    look into them, and all others are compared by their values.
    """

    def __init__(self, tree: StateTree) -> None:
        self._treedef = tree.treedef
        # With dtypes as objects, because a dtype's name is built anew at each access.
        leaves = sorted(
            ((leaf, dtype_named(leaf.spec.dtype)) for leaf in tree.leaves),
            key=lambda pair: pair[0].position,
        )
        self._arrays = [pair for pair in leaves if pair[0].sharding is not None]
        self._host_values = [pair for pair in leaves if pair[0].sharding is None]
        self._seen: list[object] = []

    def leaves_of(self, state: PyTree) -> list[Any] | None:
        """Return the leaves in the pytree's order, or None when ``state`` has another structure.

        Does not look for values: see ``tree.check_values``.
        """
        try:
            # Also takes a whole subtree for a leaf, which the checks below refuse.
            flat: list[Any] = self._treedef.flatten_up_to(state)
        except (ValueError, TypeError):
            return None
        if not all(_is_like(leaf, dtype, flat[leaf.position]) for leaf, dtype in self._host_values):
            return None
        arrays = flat
        if self._host_values:
            arrays = [flat[leaf.position] for leaf, _ in self._arrays]
        return flat if self._are_like(arrays) else None

    def _are_like(self, arrays: Sequence[Any]) -> bool:
        seen: list[object] = []
        with contextlib.suppress(AttributeError):  # a description, or no array at all
            seen = list(map(_PLACED, arrays))
            if seen == self._seen:
                return True
        if not all(
            _is_like(leaf, dtype, value)
            for (leaf, dtype), value in zip(self._arrays, arrays, strict=True)
        ):
            return False
        self._seen = seen
        return True


def _is_like(leaf: Leaf, dtype: np.dtype[Any], value: Any) -> bool:
    if leaf.kind is LeafKind.SCALAR:
        # A Python number may change its type from step to step.
        return is_python_number(value) and np.asarray(value).dtype == dtype
    if leaf.kind is LeafKind.NUMPY:
        is_host = isinstance(value, np.ndarray | np.generic)
        # Values of another byte order have the same name and are stored alike.
        is_named = is_host and value.dtype.name == leaf.spec.dtype
        return is_named and value.shape == leaf.spec.global_shape
    if not isinstance(value, jax.Array) and not jax.tree_util.all_leaves([value]):
        return False
    sharding = getattr(value, "sharding", None)
    if sharding is not leaf.sharding and sharding != leaf.sharding:
        return False
    if leaf.kind is LeafKind.ARRAY:
        return value.shape == leaf.spec.global_shape and value.dtype == dtype
    return (
        is_key_type(value.dtype)
        and value.shape == leaf.spec.global_shape[:-1]  # key data have one more dimension
        and str(jax.random.key_impl(value)) == leaf.spec.key_impl
    )
