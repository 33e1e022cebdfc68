"""The write of an Orbax step by one process whose arrays are loaded while it is written.

Orbax takes all arrays at once; here each is put together when its turn comes, so that a state
needs no second copy in memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.restore.leaves import STORED_AS_UINT8
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.core.step_names import leaves_by_item
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.storage.marker import ITEM
from emergency_ckpt.tier import StepReader, leaf_bytes, read_leaf
from emergency_ckpt.types import LeafSpec

_BATCH_BYTES = 256 << 20
_CHUNKED_BYTES = 16 << 20  # smaller leaves are one chunk
_KEYS_SEPARATOR = "/"


@dataclasses.dataclass(frozen=True, eq=False)
class LateArray:
    """An array that is loaded when it is written.

    Attributes:
      chunk_bytes: largest chunk in storage, so that a reader of a part need not read all.
      load: returns the array. Called once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_bytes: int | None
    load: Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


class _LateArrayHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, for those that are loaded later."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Return the future of all writes, which begin when its result is asked for."""
        del args
        return [_Writes(self, list(zip(values, infos, strict=True)))]

    async def write(self, batch: Sequence[tuple[LateArray, Any]]) -> Sequence[Any]:
        """Load the arrays of a batch and begin to write them."""
        arrays = [each.load() for each, _ in batch]
        args = [ocp.SaveArgs(chunk_byte_size=each.chunk_bytes) for each, _ in batch]
        return await super().serialize(arrays, [info for _, info in batch], args)

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return nothing to wait for: the batches bound the memory."""
        return [(0, 0) for _ in values]


class _Writes:
    """The writes of late arrays, batch after batch."""

    def __init__(self, handler: _LateArrayHandler, pending: list[tuple[LateArray, Any]]) -> None:
        self._handler = handler
        self._pending = pending

    def result(self, timeout: float | None = None) -> None:
        """Write all that is pending. Blocks; errors of ``load`` and of TensorStore pass through."""
        pending, self._pending = self._pending, []
        for batch in _batches(pending):
            for future in asyncio.run(self._handler.write(batch)):
                future.result(timeout)


def _batches(pending: Sequence[tuple[LateArray, Any]]) -> Iterator[list[tuple[LateArray, Any]]]:
    batch: list[tuple[LateArray, Any]] = []
    size_bytes = 0
    for each in pending:
        if batch and size_bytes + each[0].nbytes > _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(each)
        size_bytes += each[0].nbytes
    if batch:
        yield batch


def late_array(
    leaf: LeafSpec, load: Callable[[], npt.NDArray[Any]], chunk_bytes: int | None
) -> Any:
    """Return what Orbax writes for a leaf: as a save of the live state would have stored it.

    None without elements. The array of a PRNG key is loaded at once: it is small, and Orbax must
    see that it is a key.
    """
    if 0 in leaf.global_shape:
        return None
    if leaf.key_impl is not None:
        return jax.random.wrap_key_data(jax.numpy.asarray(load()), impl=leaf.key_impl)
    if leaf.dtype in STORED_AS_UINT8:
        return LateArray(
            leaf.global_shape, np.dtype(np.uint8), chunk_bytes, lambda: load().view(np.uint8)
        )
    return LateArray(leaf.global_shape, dtype_named(leaf.dtype), chunk_bytes, load)


def late_trees(
    step: StepReader,
    like: Mapping[str, epath.Path],
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], bool]:
    """Return the trees of a step's arrays by Orbax's items; True when they are like ``like``.

    A step has the paths of leaves alone. The nodes of an item that has other leaves in ``like`` are
    dicts; so are all, in the item ``state``, where leaves are in none of ``like``. ``progress``:
    called with the bytes of each leaf that was read.
    """

    def load(path: str) -> npt.NDArray[Any]:
        array = read_leaf(step, path)
        progress(array.nbytes)
        return array

    values = {
        path: late_array(spec, functools.partial(load, path), _chunk_bytes(step, path))
        for path, spec in step.leaves.items()
    }
    parts = leaves_by_item(like, values)
    if not like or sum(map(len, parts.values())) < len(values):
        return {ITEM: tree_of(values)}, False
    trees = {name: tree_like(item, parts[name]) for name, item in like.items()}
    unlike = {name: tree_of(parts[name]) for name, tree in trees.items() if tree is None}
    return trees | unlike, not unlike


def _chunk_bytes(step: StepReader, path: str) -> int | None:
    """Return the size of a leaf's largest shard, so that a process reads little but its own."""
    spec, boxes = step.leaves[path], step.boxes(path)
    if len(boxes) < 2 or leaf_bytes(spec) < _CHUNKED_BYTES:
        return None
    return max(map(volume, boxes)) * DTYPE_ITEM_BYTES.get(spec.dtype, 1)


def write_late_step(
    folder: epath.Path, trees: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write trees of late arrays as the items of Orbax's step ``folder``. Blocks; in one process.

    An item that is an empty container is left out: Orbax writes none. ``metadata``: custom metadata
    of the step. Errors of Orbax and of ``load`` pass through.
    """
    of_keys = ocp.type_handlers.get_type_handler(jax.Array)  # which records their implementation
    registry = ocp.type_handlers.create_type_handler_registry(
        (LateArray, _LateArrayHandler()), (jax.Array, of_keys)
    )
    trees = {n: tree for n, tree in trees.items() if not ocp.utils.is_empty_node(tree)}
    items: dict[str, Any] = {
        name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
        for name in trees
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items)) as checkpointer:
        args = ocp.args.Composite(**{n: ocp.args.PyTreeSave(tree) for n, tree in trees.items()})
        checkpointer.save(folder, args=args, custom_metadata=dict(metadata))


def tree_of(values: Mapping[str, Any]) -> Any:
    """Return nested dicts with ``values`` at their paths. InvalidState when two are in the way."""
    root: dict[str, Any] = {}
    if list(values) == [""]:
        return values[""]
    for path, value in sorted(values.items()):
        *outer, last = path.split(_KEYS_SEPARATOR)
        inner = root
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise _in_the_way(path)
        if last in inner:
            raise _in_the_way(path)
        inner[last] = value
    return root


def _in_the_way(path: str) -> InvalidState:
    return InvalidState(
        "write", f"leaf {path!r}", "a key with a slash makes its path that of another leaf's child"
    )


def tree_like(item: epath.Path, values: Mapping[str, Any]) -> Any | None:
    """Return ``values`` in the structure of the Orbax item, or None when its leaves are others.

    Leaves with None for a value are not among the item's, as arrays without elements.
    """
    tree = ocp.StandardCheckpointHandler().metadata(item).tree
    found = {_path_of(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    if found != {path for path, value in values.items() if value is not None}:
        return None

    def value_at(key_path: Any, described: Any) -> Any:
        del described
        return values[_path_of(key_path)]

    return jax.tree_util.tree_map_with_path(value_at, tree)


def _path_of(key_path: Any) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator=_KEYS_SEPARATOR)
