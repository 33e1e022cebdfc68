"""Trees to restore into, made of what was saved: where the caller gives no tree, or part of one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental.layout import Format

from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.materialize import layout_of
from emergency_ckpt.state.tree import PyTree, is_key_type, is_python_number, path_of
from emergency_ckpt.storage.item import tree_of
from emergency_ckpt.types import LeafSpec

_DIFFERS = "User-provided restore item and on-disk value metadata tree structures do not match"


def stored_tree(item: epath.Path, keys: Mapping[str, str]) -> PyTree:
    """Return the tree of an Orbax item with the shapes, dtypes and shardings of its leaves.

    ``keys``: the implementation of each leaf of PRNG keys, by path. Blocks for storage. Errors of
    Orbax pass through.
    """

    def leaf_of(path: Any, metadata: Any) -> Any:
        """Return the leaf to restore into, of the kind, dtype and sharding of ``metadata``."""
        if isinstance(metadata, ocp.metadata.ScalarMetadata):
            return np.dtype(metadata.dtype).type(0).item()
        leaf: Any = _host_array(metadata.shape, metadata.dtype)
        sharding = None if metadata.sharding is None else metadata.sharding.to_jax_sharding()
        if sharding is not None:
            leaf = jax.ShapeDtypeStruct(metadata.shape, metadata.dtype, sharding=sharding)
        impl = keys.get(path_of(path))
        return leaf if impl is None else _key_of(leaf, impl)

    described = ocp.PyTreeCheckpointHandler().metadata(item).tree
    return jax.tree_util.tree_map_with_path(leaf_of, described)


def nested(leaves: Sequence[LeafSpec]) -> PyTree:
    """Return dicts with the leaves at their paths, without shardings: RAM alone has the step."""
    trees: dict[str, Any] = {}
    for leaf in leaves:
        data = jax.ShapeDtypeStruct(leaf.global_shape, dtype_named(leaf.dtype))
        trees[leaf.path] = data if leaf.key_impl is None else _key_of(data, leaf.key_impl)
    return tree_of(trees)


def _key_of(data: Any, impl: str) -> Any:
    """Return the PRNG keys whose data ``data`` describes."""
    bare = jax.ShapeDtypeStruct(data.shape, data.dtype)
    key: Any = jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=impl), bare)
    sharding: Any = getattr(data, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = sharding.update(spec=sharding.spec[: len(key.shape)])
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)


def _host_array(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.zeros((), dtype), shape)  # of no size in memory


def is_complete(item: PyTree) -> bool:
    """Return whether a tree says all that a restore needs: each leaf's shape, dtype, sharding."""
    if item is None:
        return False
    for leaf in jax.tree.leaves(item):
        is_host = isinstance(leaf, np.ndarray | np.generic) or is_python_number(leaf)
        is_placed = _is_described(leaf) and getattr(leaf, "sharding", None) is not None
        if not (is_host or is_placed):
            return False
    return True


class Wanted:
    """The tree to restore into for one item, and the part of it that the caller gets.

    Attributes:
      target: the tree to restore into, with all leaves of the item.

    Args:
      saved: the whole item, as ``stored_tree`` returns it.
      item: the caller's tree. A leaf that does not say its shape and dtype, or its sharding, takes
        those that were saved, and a PLACEHOLDER stays as it is. None: ``saved``.
      restore_args: Orbax's, by leaf, whose shardings go first.
      is_partial: ``item`` may have fewer leaves than were saved; those that were not stay as given.

    Raises:
      ValueError: ``item`` has other leaves than were saved; a cast is asked for.
    """

    def __init__(self, saved: PyTree, item: PyTree, restore_args: Any, *, is_partial: bool) -> None:
        whole, treedef = by_path(saved)
        item_leaves, self._structure = (whole, treedef) if item is None else by_path(item)
        unknown, missing = (
            sorted(set(item_leaves) - set(whole)),
            sorted(set(whole) - set(item_leaves)),
        )
        if not is_partial and (unknown or missing):
            raise ValueError(f"{_DIFFERS}: only in item {unknown[:4]}, only saved {missing[:4]}")
        args = {} if restore_args is None else by_path(restore_args)[0]
        leaves = [
            _placed(_filled(item_leaves.get(path), leaf), args.get(path))
            for path, leaf in whole.items()
        ]
        self.target = jax.tree.unflatten(treedef, leaves)
        self._order = list(item_leaves)
        self._as_given = {
            path: leaf
            for path, leaf in item_leaves.items()
            if leaf is ocp.PLACEHOLDER or path not in whole
        }

    def part_of(self, restored: PyTree) -> PyTree:
        """Return what the caller asked for of the restored tree."""
        leaves = {**by_path(restored)[0], **self._as_given}
        return jax.tree.unflatten(self._structure, [leaves[path] for path in self._order])


def _is_described(leaf: Any) -> bool:
    """Return whether a leaf says its shape and dtype; Orbax's ``ArrayRestoreArgs`` may say None."""
    return not (getattr(leaf, "shape", None) is None or getattr(leaf, "dtype", None) is None)


def _filled(leaf: Any, saved: Any) -> Any:
    if leaf is None or leaf is ocp.PLACEHOLDER:
        return saved
    if is_python_number(leaf) or isinstance(leaf, np.generic):
        return leaf if is_python_number(saved) else saved
    if not _is_described(leaf):
        return saved
    # A format is a sharding with a layout on the devices.
    own_sharding = getattr(leaf, "sharding", None) if layout_of(leaf) is None else leaf.format
    sharding = own_sharding or getattr(saved, "sharding", None)
    if isinstance(leaf, np.ndarray) or sharding is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(leaf: Any, args: Any) -> Any:
    """Return ``leaf`` with the sharding of Orbax's restore arguments, if they have one.

    ValueError for another dtype or shape: nothing is cast, filled or cut.
    """
    shape = getattr(args, "global_shape", None)
    is_array = hasattr(leaf, "dtype") and not is_key_type(leaf.dtype)
    if shape is not None and is_array and tuple(shape) != tuple(leaf.shape):
        raise ValueError(
            f"restore_args with another global_shape {tuple(shape)} than the saved"
            f" {tuple(leaf.shape)} are not supported: pad or cut the result"
        )
    dtype = getattr(args, "dtype", None)
    if dtype is not None and hasattr(leaf, "dtype") and dtype != leaf.dtype:
        raise ValueError("restore_args with another dtype are not supported: cast the result")
    if getattr(args, "restore_type", None) is np.ndarray and hasattr(leaf, "dtype"):
        return _host_array(leaf.shape, leaf.dtype)
    sharding = getattr(args, "sharding", None)
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding | Format):
        sharding = sharding.to_jax_sharding()
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if sharding is None and mesh is not None and axes is not None:
        sharding = jax.sharding.NamedSharding(mesh, axes)
    if sharding is None or not hasattr(leaf, "shape"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def by_path(tree: PyTree) -> tuple[dict[str, Any], Any]:
    """Return the leaves by path, in order, and the structure. ``PLACEHOLDER`` is a leaf."""

    def is_placeholder(node: object) -> bool:
        return node is ocp.PLACEHOLDER

    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_placeholder)
    return {path_of(keys): leaf for keys, leaf in flat}, treedef
