"""The Orbax item with the arrays of a step, written through TensorStore: its parts and documents.

With thousands of arrays, Orbax's own handlers take ten times as long as the writes. In this module
the work for each array is one open and one write. The files are those of Orbax's handler of
pytrees, and Orbax reads them.

1. ``item_state`` makes the arrays of the item from the shards, and the part of each that this
   process writes, as views of the host memory. If several processes hold the same box, each stores
   an equal part of it. This module also makes the three JSON documents: the tree (``ItemTree``),
   the shardings, the arrays.
2. ``array_writes`` writes the parts into the process's own OCDBT database below the item, in few
   transactions, each of which is one commit of the database. When all writers have written, it
   merges their databases into that of the item.
3. ``step_writer`` writes the small files. A crash before the commit leaves a folder that does not
   count: data without a manifest, or the databases of some writers.

Guaranteed: values are neither copied nor changed, except values that are compressed or are not
contiguous in memory; data and databases are synced to the disk before they count, as by Orbax.

Not guaranteed: that nothing of a cancelled write reaches storage. A write that TensorStore has
begun may end later, in a folder that does not count.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.core.boxes import chunk_shape, relative, shape_of, slices, volume, whole
from emergency_ckpt.core.restore.leaves import STORED_AS_UINT8
from emergency_ckpt.core.step_names import leaves_by_item
from emergency_ckpt.errors import InvalidState, PersistentTierError
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.state.tree import Leaf, LeafKind, PyTree, StateTree, boxes_by_device, path_of
from emergency_ckpt.storage.marker import ITEM
from emergency_ckpt.storage.writer_arrays import spread, storage_sharding
from emergency_ckpt.tier import StepReader, leaf_bytes, read_leaf
from emergency_ckpt.types import Box, LeafSpec, ShardId

JAX_ARRAY, NUMPY_ARRAY, SCALAR = "jax.Array", "np.ndarray", "scalar"
"""Orbax's names of the types of leaves."""
SHARDINGS = "_sharding"

_SEQUENCE, _MAPPING = 1, 2
_EMPTY = ((list, "List"), (tuple, "Tuple"), (Mapping, "Dict"))
_CHUNKED_BYTES = 16 << 20  # smaller leaves are one chunk


class StoredPart(NamedTuple):
    """A box of an array. ``load``: returns the values; called once, when they are written."""

    box: Box
    nbytes: int
    load: Callable[[], npt.NDArray[Any]]


def loaded_part(box: Box, values: npt.NDArray[Any]) -> StoredPart:
    """Return a box whose values are in memory."""
    return StoredPart(box, values.nbytes, lambda: values)


@dataclasses.dataclass(frozen=True, eq=False)
class ItemArray:
    """One array as it is stored.

    Attributes:
      kind: Orbax's name of the leaf's type.
      write_shape: shape of the parts; the last part along an axis is no smaller.
      sharding: the placement of the parts; None for host values.
      key_impl: implementation of PRNG keys; else None.
      parts: the parts that this process writes.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    key_impl: str | None
    parts: tuple[StoredPart, ...]


class _Place(NamedTuple):
    """The place of leaves of one sharding, shape and dtype.

    ``mine``: the boxes that this process writes, each after the saved box of which it is a part.
    """

    sharding: jax.sharding.Sharding
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mine: tuple[tuple[Box, Box], ...]


def item_state(
    tree: StateTree, shards: Mapping[ShardId, HostShard], writers: Sequence[int]
) -> PyTree:
    """Return the state with an ``ItemArray`` for each leaf, and None for leaves without elements.

    Values are views of ``shards``. A process that is none of the ``writers`` has no parts.
    """
    values: dict[str, ItemArray | None] = {}
    # Leaves of one sharding and shape have one place, which costs more time than the array.
    places: dict[tuple[object, ...], _Place] = {}
    hosts = {shard.leaf: shard for shard in shards}
    for leaf in tree.leaves:
        path, shape = leaf.spec.path, leaf.spec.global_shape
        if 0 in shape:
            values[path] = None
        elif leaf.sharding is None:
            shard = shards[hosts[path]] if jax.process_index() == writers[0] else None
            values[path] = _host_array(leaf, shard)
        else:
            key = (leaf.sharding, shape, leaf.kind, leaf.spec.dtype)
            if key not in places:
                places[key] = _place_of(leaf, leaf.sharding, writers)
            values[path] = _device_array(leaf, places[key], shards)
    return tree.unflatten(values)


def _values(leaf: Leaf, shard: HostShard) -> npt.NDArray[Any]:
    """Return the shard's values, as bytes for a dtype that the storage format does not know."""
    return shard.view.view(np.uint8) if leaf.spec.dtype in STORED_AS_UINT8 else shard.view


def _host_array(leaf: Leaf, shard: HostShard | None) -> ItemArray:
    """Return the array of a host value. ``shard``: None where another process writes the value."""
    dtype = _stored_dtype(leaf.spec)
    # Orbax does not support Python's complex.
    is_number = leaf.kind is LeafKind.SCALAR and dtype.kind != "c"
    shape = leaf.spec.global_shape
    return ItemArray(
        shape,
        dtype.name,
        SCALAR if is_number else NUMPY_ARRAY,
        shape,
        chunk_shape(shape, dtype.itemsize),
        None,
        None,
        () if shard is None else (loaded_part(whole(shape), _values(leaf, shard)),),
    )


def _stored_dtype(spec: LeafSpec) -> np.dtype[Any]:
    return np.dtype(np.uint8) if spec.dtype in STORED_AS_UINT8 else dtype_named(spec.dtype)


def _device_array(leaf: Leaf, place: _Place, shards: Mapping[ShardId, HostShard]) -> ItemArray:
    dtype = "uint8" if leaf.spec.dtype in STORED_AS_UINT8 else leaf.spec.dtype
    sharding = place.sharding
    if leaf.kind is LeafKind.KEYS and isinstance(sharding, jax.sharding.NamedSharding):
        # As JAX gives it to the data of PRNG keys.
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec, None))
    parts: list[StoredPart] = []
    for saved, stored in place.mine:
        values = _values(leaf, shards[ShardId(leaf.spec.path, saved)])
        if stored != saved:
            values = values[slices(relative(stored, saved))]
        parts.append(loaded_part(stored, values))
    return ItemArray(
        leaf.spec.global_shape,
        dtype,
        JAX_ARRAY,
        place.write_shape,
        place.chunk_shape,
        sharding,
        leaf.spec.key_impl,
        tuple(parts),
    )


def _place_of(leaf: Leaf, sharding: jax.sharding.Sharding, writers: Sequence[int]) -> _Place:
    shape, me = leaf.spec.global_shape, jax.process_index()
    stored = usual = storage_sharding(sharding, writers)
    # The array of a PRNG key has an axis that its sharding does not have.
    if len(writers) > 1 and leaf.kind is not LeafKind.KEYS:
        stored = spread(usual, shape)
    saved = boxes_by_device(dataclasses.replace(leaf, sharding=usual))
    boxes = boxes_by_device(dataclasses.replace(leaf, sharding=stored))
    # Of several devices that have a box, the first one writes the box.
    writer_of: dict[Box, Any] = {}
    for device, box in boxes.items():
        if device.process_index in writers:
            writer_of.setdefault(box, device)
    missing = set(boxes.values()) - writer_of.keys()
    if missing:
        problem = f"no writer holds its box {min(missing)}"
        raise PersistentTierError("save", f"leaf {leaf.spec.path!r}", problem)
    write_shape = shape_of(next(iter(boxes.values())))
    item_bytes = 1 if leaf.spec.dtype in STORED_AS_UINT8 else np.dtype(leaf.spec.dtype).itemsize
    mine = tuple((saved[dev], box) for box, dev in writer_of.items() if dev.process_index == me)
    return _Place(stored, write_shape, chunk_shape(write_shape, item_bytes), mine)


class NamedArray(NamedTuple):
    """An array with the name that Orbax gives it."""

    name: str
    array: ItemArray


class ItemTree:
    """The structure of an item: the state with an ``ItemArray`` or None for each leaf."""

    def __init__(self, state: Any) -> None:
        # Empty containers count as leaves, since Orbax keeps them.
        self._leaves = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=ocp.utils.is_empty_or_leaf
        )[0]
        self.arrays = [
            NamedArray(".".join(ocp.tree.str_keypath(keys)), value)
            for keys, value in self._leaves
            if isinstance(value, ItemArray)
        ]

    def document(self) -> str:
        """Return the document of the tree."""
        leaves: dict[str, Any] = {}
        for keys, value in self._leaves:
            names = [str(ocp.utils.get_key_name(key)) for key in keys]
            kinds = [_SEQUENCE if ocp.utils.is_sequence_key(key) else _MAPPING for key in keys]
            described: dict[str, Any]
            if isinstance(value, ItemArray):
                described = {"value_type": value.kind, "skip_deserialize": False}
                if value.kind == JAX_ARRAY:
                    described["write_shape"] = value.write_shape
            else:
                described = {"value_type": _empty(value), "skip_deserialize": True}
            named_kinds = zip(names, kinds, strict=True)
            leaves[str(tuple(names))] = {
                "key_metadata": [{"key": name, "key_type": kind} for name, kind in named_kinds],
                "value_metadata": described,
            }
        return json.dumps(
            {
                "tree_metadata": leaves,
                "use_ocdbt": True,
                "use_zarr3": False,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        )


def _empty(value: Any) -> str:
    """Return Orbax's name of an empty node. Orbax keeps no named tuples and no classes."""
    if not hasattr(value, "_fields"):
        for kind, name in _EMPTY:
            if isinstance(value, kind):
                return name
    return "None"


def shardings(arrays: Sequence[NamedArray]) -> str | None:
    """Return the document of the shardings; None when Orbax knows none of the shardings."""
    texts = {sharding: _sharding(sharding) for sharding in {array.sharding for _, array in arrays}}
    documents: dict[str, str] = {}
    for name, array in arrays:
        text = texts[array.sharding]
        if text is not None:
            documents[base64.urlsafe_b64encode(name.encode()).decode()] = text
    return json.dumps(documents) if documents else None


def _sharding(sharding: jax.sharding.Sharding | None) -> str | None:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        single = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
        return single.to_serialized_string()
    return None


def array_metadata(arrays: Sequence[NamedArray]) -> str | None:
    """Return the document of the arrays, the same for all writers; None when there are none."""
    metadata = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": array.write_shape,
                "chunk_shape": array.chunk_shape,
                "ext_metadata": array.key_impl and {"random_key_impl": array.key_impl},
            }
        }
        for name, array in arrays
        if array.kind == JAX_ARRAY
    ]
    return json.dumps({"array_metadatas": metadata}) if metadata else None


def late_items(
    step: StepReader,
    like: Mapping[str, epath.Path | None],
    structure_of: Callable[[epath.Path], Any],
    on_box: Callable[[], object],
) -> dict[str, Any]:
    """Return a step's state by Orbax's items, as ``StepWriter`` takes it, structured as ``like``.

    A step has the paths of leaves alone, so ``like`` gives the structure of each item, which
    ``structure_of`` reads. An item with other leaves, or without a folder, is made of dicts. Where
    leaves are in no item of ``like``, the whole state is one item ``state`` made of dicts. Items
    without leaves are left out, as Orbax does. ``on_box``: is called whenever a box was read.
    """
    values = {path: _late_array(step, path, on_box) for path in step.leaves}
    parts = leaves_by_item(like, values)
    if not like or sum(map(len, parts.values())) < len(values):
        return {ITEM: tree_of(values)}
    items: dict[str, Any] = {}
    for name, item in like.items():
        tree = None if item is None else _tree_like(structure_of(item), parts[name])
        items[name] = tree_of(parts[name]) if tree is None else tree
    return {name: tree for name, tree in items.items() if not ocp.utils.is_empty_node(tree)}


def _late_array(step: StepReader, path: str, on_box: Callable[[], object]) -> ItemArray | None:
    """Return an array that is read when it is written; None for a leaf without elements."""
    leaf = step.leaves[path]
    shape = leaf.global_shape
    if 0 in shape:
        return None
    dtype = _stored_dtype(leaf)

    def load() -> npt.NDArray[Any]:
        return read_leaf(step, path, on_box).view(dtype)

    part = shape
    boxes = step.boxes(path) if leaf_bytes(leaf) >= _CHUNKED_BYTES else ()
    if len(boxes) > 1:
        # Chunks as large as the largest box: so a process that reads its shard reads little else.
        part = shape_of(max(boxes, key=volume))
    return ItemArray(
        shape,
        dtype.name,
        NUMPY_ARRAY if leaf.key_impl is None else JAX_ARRAY,
        shape,
        chunk_shape(part, dtype.itemsize),
        None,
        leaf.key_impl,
        (StoredPart(whole(shape), leaf_bytes(leaf), load),),
    )


def tree_of(values: Mapping[str, Any]) -> Any:
    """Return nested dicts with ``values`` at their paths. InvalidState when two paths conflict."""
    root: dict[str, Any] = {}
    if list(values) == [""]:
        return values[""]
    for path, value in sorted(values.items()):
        *outer, last = path.split("/")
        inner = root
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            problem = "a key with a slash makes its path that of another leaf's child"
            raise InvalidState("write", f"leaf {path!r}", problem)
        inner[last] = value
    return root


def read_structure(item: epath.Path) -> Any:
    """Return the tree of an Orbax item, of descriptions. Blocks for as long as storage does."""
    return ocp.StandardCheckpointHandler().metadata(item).tree


def _tree_like(tree: Any, values: Mapping[str, Any]) -> Any | None:
    """Return ``values`` in the structure of ``tree``, or None when the leaves differ.

    The tree of an Orbax item lacks arrays without elements: leaves with the value None.
    """
    paths = {path_of(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    if paths != {path for path, value in values.items() if value is not None}:
        return None

    def value_at(key_path: Any, described: Any) -> Any:
        del described
        return values[path_of(key_path)]

    return jax.tree_util.tree_map_with_path(value_at, tree)
