"""The arrays of an Orbax step, described by its metadata and read box by box.

Orbax restores a whole state onto its devices, once per replica. To read each byte once, this module
reads boxes: plain boxes from the files of the database (``chunks``); other boxes, and all boxes in
a bucket, through TensorStore.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import msgspec
import numpy as np
import numpy.typing as npt
import tensorstore
from absl import logging
from etils import epath

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import CHUNK_BYTES, relative, shape_of, slices, split, volume
from emergency_ckpt.core.restore.leaves import stored_name
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.core.stall import USUAL_PIECE_BYTES
from emergency_ckpt.core.step_names import MANIFEST, TREE
from emergency_ckpt.core.wording import few
from emergency_ckpt.errors import ConfigError, CorruptData
from emergency_ckpt.state.tree import path_of
from emergency_ckpt.storage.calls import NOT_IN_TIME, is_damage
from emergency_ckpt.storage.chunks import ChunkIndex, FileBox, Sink, read_into
from emergency_ckpt.storage.directory import is_there, text_of
from emergency_ckpt.storage.step_folders import ITEMS
from emergency_ckpt.types import Box, LeafSpec, ShardId
from emergency_ckpt.work_progress import WorkProgress

GCS_BACKEND_VARIABLE = "TENSORSTORE_GCS_BACKEND"
"""An environment variable; the name is Orbax's, so that both use the same driver."""

_OCDBT_CACHE_BYTES = 64 << 20
_CONCURRENT_REQUESTS = 32
_MOST_NAMED = 5
_MOST_THREADS = 4
_LONGEST_WAIT_S = 1.0
"""Of one call into TensorStore, so that signals are handled meanwhile."""
_ONE_REQUEST_FOR_SEVERAL_CHUNKS = {
    "experimental_read_coalescing_threshold_bytes": 1 << 16,
    "experimental_read_coalescing_merged_bytes": 2 << 20,
    "experimental_read_coalescing_interval": "5ms",
}
"""TensorStore's settings, for chunks so close in a data file that are read within that time.

A request costs more than 64 KiB, so TensorStore also reads a shorter gap between two chunks. The
chunk in the gap is then read twice, by this process or by another."""


class StoredLeaf(NamedTuple):
    """A leaf as described by Orbax's metadata; ``spec`` has no PRNG implementation."""

    spec: LeafSpec
    array: StoredArray


def _stored_leaf(
    path: str,
    name: str,
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    dtype: np.dtype[Any],
    **form: Any,
) -> StoredLeaf:
    """Return the description of a leaf; ``form``: the other fields of ``StoredArray``."""
    array = StoredArray(name, shape, chunk_shape, dtype.itemsize, **form)
    return StoredLeaf(LeafSpec(path, dtype.name, shape), array)


def describe_item(item: epath.Path) -> dict[str, StoredLeaf]:
    """Return the arrays of an Orbax item by path, from its metadata alone. Not collective.

    A leaf that is no array, such as a text of plain Orbax, is left out: no state can ask for such a
    leaf. Errors of Orbax and of the storage client pass through.
    """
    import orbax.checkpoint as ocp  # noqa: PLC0415

    ocdbt = is_there(item / MANIFEST)
    try:
        metadata = ocp.StandardCheckpointHandler().metadata(item)
    except FileNotFoundError as error:
        if not is_there(item / TREE):
            raise
        # Orbax takes every error of a file system for absence.
        raise ConnectionError(f"{item / TREE} is there, and Orbax does not find it") from error
    driver = "zarr3" if metadata.use_zarr3 else "zarr"
    leaves: dict[str, StoredLeaf] = {}
    for key_path, value in jax.tree_util.tree_leaves_with_path(metadata.tree):
        path = path_of(key_path)
        if getattr(value, "shape", None) is None or getattr(value, "dtype", None) is None:
            continue
        shape = tuple(int(size) for size in value.shape)
        chunks = getattr(getattr(value, "storage", None), "chunk_shape", None)
        chunk_shape = shape if chunks is None else tuple(int(size) for size in chunks)
        dtype = np.dtype(value.dtype)
        leaves[path] = _stored_leaf(
            path, value.name, shape, chunk_shape, dtype, driver=driver, ocdbt=ocdbt
        )
    return leaves


def open_by_name(
    item: epath.Path, paths: Iterable[str], deadline_s: float
) -> dict[str, StoredLeaf] | None:
    """Open the arrays of an item's leaves by name; return None when the names are ambiguous.

    The result equals that of ``describe_item``, for an item of this package, in a tenth of the
    time, because Orbax reads all metadata of each array. Not collective. Errors of TensorStore pass
    through; DeadlineExceeded at ``deadline_s`` of ``time.monotonic``.
    """
    names = {path: stored_name(path) for path in paths}
    if len(set(names.values())) < len(names):
        return None  # ``{"a/b": ..., "a.b": ...}``: only one of these leaves has this name
    progress = WorkProgress.until(deadline_s)
    # In a bucket all items of this package are databases; a look would take a request.
    ocdbt = in_bucket(item) or is_there(item / MANIFEST)
    if ocdbt and (indexed := _from_index(str(item), names, progress)) is not None:
        return indexed

    def start(path: str, context: tensorstore.Context) -> Any:
        spec = _spec(str(item), names[path], driver="zarr", ocdbt=ocdbt)
        return tensorstore.open(spec, open=True, context=context)

    try:
        stores = _opened(names, start, str(item), progress)
    except ValueError as error:
        if str(error).startswith("NOT_FOUND"):
            return None
        raise
    leaves: dict[str, StoredLeaf] = {}
    for path, store in stores.items():
        shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
        chunk_shape = tuple(store.chunk_layout.read_chunk.shape or shape)  # a scalar has none
        leaves[path] = _stored_leaf(path, names[path], shape, chunk_shape, dtype, ocdbt=ocdbt)
    return leaves


def _from_index(
    item: str, names: Mapping[str, str], progress: WorkProgress
) -> dict[str, StoredLeaf] | None:
    """Describe all arrays from the nodes of the database; None where TensorStore must open them.

    A node has the metadata of thousands of arrays, which TensorStore opens one by one.
    """
    try:
        index = ChunkIndex.open(item, progress)
    except ValueError as error:
        if not is_damage(error):
            raise
        index = None  # TensorStore's error names the array of a node
    if index is None:
        return None
    leaves: dict[str, StoredLeaf] = {}
    for path, name in names.items():
        form = index.form_of(name)
        if form is None:
            return None
        leaves[path] = _stored_leaf(
            path, name, form.shape, form.chunk_shape, form.dtype, plain=form.is_plain
        )
    return leaves


def describe_plain(
    folder: epath.Path, item: str | None
) -> tuple[epath.Path, dict[str, StoredLeaf]]:
    """Return the folder of a step's arrays and its leaves by path, from metadata alone. Blocks.

    ``item``: the name of the item to take; None: the first item of ``ITEMS``. Without such an item
    the arrays of all items form one state whose keys are the items' names. FileNotFoundError when
    there is no such item, or no item with arrays. Errors of Orbax pass through.
    """

    def has_arrays(name: str) -> bool:
        return is_there(folder / name / TREE)

    usual = next(filter(has_arrays, (*ITEMS, "") if item is None else (item,)), None)
    if usual is not None:
        names = [usual]
    else:
        below = sorted(path.name for path in folder.iterdir() if path.is_dir())
        names = list(filter(has_arrays, below)) if item is None else []
        if not names:
            problem = "no item of arrays"
            if item is not None:
                problem = f"no item {item!r} of arrays"
            raise FileNotFoundError(f"{problem} in it; it has {', '.join(below) or 'none'}")
    return describe_items(folder, names, lambda name: describe_item(folder / name))


def describe_items(
    folder: epath.Path, names: Sequence[str], describe: Callable[[str], Mapping[str, StoredLeaf]]
) -> tuple[epath.Path, dict[str, StoredLeaf]]:
    """Return the folder of the items ``names``, and their leaves by path, from ``describe``.

    The leaves of several items are below the names of their items.
    """
    if len(names) == 1:
        return folder / names[0] if names[0] else folder, dict(describe(names[0]))
    leaves: dict[str, StoredLeaf] = {}
    for name in names:
        for path, (spec, array) in describe(name).items():
            below = msgspec.structs.replace(spec, path=f"{name}/{path}" if path else name)
            leaves[below.path] = StoredLeaf(below, msgspec.structs.replace(array, item=name))
    return folder, leaves


class _Part(NamedTuple):
    """Whole chunks of a box, which are requested together."""

    shard: ShardId
    box: Box
    nbytes: int
    is_last: bool


class _Request(NamedTuple):
    """A part that was requested from TensorStore."""

    part: _Part
    future: Any


class BoxReader:
    """Reads boxes of a step. Not thread-safe.

    Args:
      item: directory of the Orbax item; with several items, that of the step.
      complete: a missing chunk is an error; otherwise a missing chunk has the fill value.
      buffer_bytes: maximum number of bytes requested at once. A larger chunk is read alone.
      progress: counts received bytes; DeadlineExceeded when nothing moves any more.
    """

    def __init__(
        self,
        item: str,
        arrays: Mapping[str, StoredArray],
        *,
        complete: bool,
        buffer_bytes: int,
        progress: WorkProgress,
    ) -> None:
        self._item = item.rstrip("/")
        self._arrays = arrays
        self._complete = complete
        self._buffer_bytes = buffer_bytes
        self._progress = progress

    def read(self, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, npt.NDArray[Any]]]:
        """Yield the boxes in the given order, C-contiguous.

        CorruptData, with the leaf, where TensorStore cannot decode; its other errors pass through.
        """
        gathered: npt.NDArray[Any] | None = None
        with contextlib.closing(self._read_parts(shards)) as parts:
            for part, array in parts:
                box_array = array
                if part.box != part.shard.box:
                    if gathered is None:
                        gathered = np.empty(shape_of(part.shard.box), array.dtype)
                    gathered[slices(relative(part.box, part.shard.box))] = array
                    box_array = gathered
                if part.is_last:
                    gathered = None
                    yield part.shard, box_array

    def _read_parts(self, shards: Sequence[ShardId]) -> Generator[tuple[_Part, npt.NDArray[Any]]]:
        leaves = {shard.leaf for shard in shards}
        stores = self._open(leaves)
        parts = deque(enumerate(self._parts_of(shards)))  # not requested yet
        requests: dict[int, _Request] = {}
        most_bytes, asked_bytes, number = self._buffer_bytes, 0, 0
        try:
            while parts or requests:
                while parts and (
                    number not in requests or asked_bytes + parts[0][1].nbytes <= most_bytes
                ):
                    asked, part = parts.popleft()
                    store = stores[part.shard.leaf]
                    requests[asked] = _Request(part, store[slices(part.box)].read(order="C"))
                    asked_bytes += part.nbytes
                if _has_come(requests[number].future, self._item, self._progress):
                    request = requests.pop(number)
                    asked_bytes -= request.part.nbytes
                    number += 1
                    yield request.part, self._result(request)
                    continue
                # A connection hangs, or the read of a database's node: request the missing parts
                # through newly opened arrays. Or the link is slow: request fewer bytes at once.
                logging.warning("%s: no data arrive, so they are requested again", self._item)
                late = {n: request for n, request in requests.items() if not request.future.done()}
                for given_up in sorted(late, reverse=True):
                    requests.pop(given_up).future.cancel()
                    parts.appendleft((given_up, late[given_up].part))
                    asked_bytes -= late[given_up].part.nbytes
                stores, most_bytes = self._open(leaves), min(most_bytes, USUAL_PIECE_BYTES)
        finally:
            for request in requests.values():
                request.future.cancel()

    def _parts_of(self, shards: Sequence[ShardId]) -> Iterator[_Part]:
        for shard in shards:
            array = self._arrays[shard.leaf]
            boxes = split(shard.box, array.chunk_shape, array.item_bytes, CHUNK_BYTES)
            for box in boxes:
                nbytes = volume(box) * array.item_bytes
                self._progress.expect(0, piece_bytes=nbytes)
                yield _Part(shard, box, nbytes, box == boxes[-1])

    def read_into(self, sink: Sink, boxes: Sequence[tuple[ShardId, int]]) -> list[int]:
        """Read each box to its offset in bytes; return the CRC32C of each box. Blocks.

        ``sink`` must refuse bytes that are not wanted any more. Errors of TensorStore, of the file
        system and of the sink pass through; CorruptData, DeadlineExceeded.
        """
        in_files = self._in_files(boxes)
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        read = read_into(list(in_files.values()), sink, threads=threads, progress=self._progress)
        crcs = dict(zip(in_files, read, strict=True))
        others = [number for number in range(len(boxes)) if number not in in_files]
        arrays = self.read([boxes[number][0] for number in others]) if others else ()
        for number, (_, array) in zip(others, arrays, strict=True):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            crcs[number] = _native.crc32c(data)
            sink.write(data, boxes[number][1])
        return [crcs[number] for number in range(len(boxes))]

    def _in_files(self, boxes: Sequence[tuple[ShardId, int]]) -> dict[int, FileBox]:
        """Return the boxes that can be read from the files of the database, by their number."""
        indexes: dict[str, ChunkIndex | None] = {}
        file_boxes: dict[int, FileBox] = {}
        for number, (shard, offset) in enumerate(boxes):
            array = self._arrays[shard.leaf]
            item = self._item_of(array)
            if array.plain and item not in indexes:
                indexes[item] = ChunkIndex.open(item, self._progress)
            index = indexes.get(item)
            parts = None if index is None else index.parts_of(shard, array)
            if parts is not None:
                file_boxes[number] = FileBox(parts, offset)
        return file_boxes

    def _result(self, request: _Request) -> npt.NDArray[Any]:
        try:
            array = request.future.result()
        except ValueError as error:
            if not is_damage(error):
                raise
            raise _damaged("read", self._item, {request.part.shard.leaf: error}) from error
        self._progress.add(request.part.nbytes)
        return array

    def _open(self, leaves: set[str]) -> dict[str, Any]:
        def start(leaf: str, context: tensorstore.Context) -> Any:
            array = self._arrays[leaf]
            item = self._item_of(array)
            spec = _spec(item, array.name, driver=array.driver, ocdbt=array.ocdbt)
            if self._complete:
                spec["fill_missing_data_reads"] = False
            return tensorstore.open(spec, open=True, context=context)

        stores = _opened(sorted(leaves), start, self._item, self._progress)
        for leaf, store in stores.items():
            array = self._arrays[leaf]
            expected = (array.shape, array.item_bytes)
            actual = (tuple(store.shape), store.dtype.numpy_dtype.itemsize)
            if actual != expected:
                target = f"{self._item}, array {array.name!r}"
                problem = "it differs from the metadata (shape, bytes of an element)"
                raise CorruptData("open", target, problem, expected=expected, actual=actual)
        return stores

    def _item_of(self, array: StoredArray) -> str:
        return f"{self._item}/{array.item}" if array.item else self._item


def _has_come(future: Any, item: str, progress: WorkProgress) -> bool:
    """Wait for TensorStore's ``future``; return False if nothing moves for half the stall limit.

    DeadlineExceeded after the whole stall limit.
    """
    quiet_s = max(time.monotonic(), progress.moved_s) + progress.limits.stall_s / 2
    while not future.done():
        now_s = time.monotonic()
        if now_s >= progress.deadline_s:
            raise progress.error("read", item, NOT_IN_TIME)
        if now_s >= quiet_s:
            return False
        left_s = min(quiet_s, progress.deadline_s) - now_s
        with contextlib.suppress(TimeoutError):
            future.exception(timeout=min(left_s, _LONGEST_WAIT_S))
    return True


def _opened(
    leaves: Iterable[str],
    start: Callable[[str, tensorstore.Context], Any],
    item: str,
    progress: WorkProgress,
) -> dict[str, Any]:
    """Return the opened arrays by leaf. Where nothing moves, late arrays are opened again.

    When one array fails or is late, the others are cancelled. ``start`` begins to open the array of
    a leaf. CorruptData names all leaves whose metadata TensorStore cannot decode.
    """
    leaves = tuple(leaves)
    futures: dict[str, Any] = {}
    stores: dict[str, Any] = {}
    damaged: dict[str, Exception] = {}
    try:
        while True:
            # One context for all arrays, so that the nodes of the database are read once.
            context = _context()
            futures |= {leaf: start(leaf, context) for leaf in leaves if leaf not in futures}
            for future in futures.values():
                if not _has_come(future, item, progress):
                    break
                progress.touch()
            else:
                break
            for leaf in [leaf for leaf, future in futures.items() if not future.done()]:
                futures.pop(leaf).cancel()
        for leaf in leaves:
            try:
                stores[leaf] = futures[leaf].result()
            except ValueError as error:
                if not is_damage(error):
                    raise
                damaged[leaf] = error
    finally:
        for future in futures.values():
            future.cancel()
    if damaged:
        raise _damaged("open", item, damaged)
    return stores


def _damaged(operation: str, item: str, errors: Mapping[str, Exception]) -> CorruptData:
    """Return the error that names the leaves that TensorStore could not decode."""
    word = "leaf" if len(errors) == 1 else "leaves"
    target = f"{item}, {word} {few(map(repr, errors), _MOST_NAMED)}"
    return CorruptData(operation, target, text_of(next(iter(errors.values()))))


def _context() -> tensorstore.Context:
    return tensorstore.Context(
        {
            # Chunks are read once, and nodes of the database often.
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#ocdbt": {"total_bytes_limit": _OCDBT_CACHE_BYTES},
            "gcs_request_concurrency": {"limit": _CONCURRENT_REQUESTS},
        }
    )


def _spec(item: str, name: str, *, driver: str, ocdbt: bool) -> dict[str, Any]:
    """Return TensorStore's spec of an array of an item."""
    # As Orbax writes it; TensorStore adds a slash unless the name ends with one.
    if not ocdbt:
        return {"driver": driver, "kvstore": kvstore_of(item, name)}
    kvstore: dict[str, Any] = {
        "driver": "ocdbt",
        "base": kvstore_of(item),
        "cache_pool": "cache_pool#ocdbt",
        "path": name,
    }
    if in_bucket(item):
        kvstore |= _ONE_REQUEST_FOR_SEVERAL_CHUNKS
    return {"driver": driver, "kvstore": kvstore}


def in_bucket(path: object) -> bool:
    """Return True for a path in a bucket of GCS."""
    return str(path).startswith("gs://")


def kvstore_of(item: str, name: str = "") -> dict[str, Any] | str:
    """Return TensorStore's key-value store of an item, or of an array in the item.

    The store is a driver and a path, because a URL gives ``%``, ``#``, ``?`` and ``|`` a meaning.
    """
    scheme, separator, rest = item.partition("://")
    if not separator:
        return {"driver": "file", "path": f"{os.path.normpath(item)}/{name}"}
    if scheme == "gs":
        driver = os.environ.get(GCS_BACKEND_VARIABLE, "gcs")  # the user chooses, as for Orbax
        if driver not in ("gcs", "gcs_grpc"):
            problem = f"{driver!r} is no driver of buckets: gcs (HTTP) and gcs_grpc are"
            raise ConfigError([problem], target=GCS_BACKEND_VARIABLE)
        bucket, _, path = rest.partition("/")
        place = f"{path.rstrip('/')}/{name}".lstrip("/")
        return {"driver": driver, "bucket": bucket, "path": place}
    return f"{scheme}://{quote(rest.rstrip('/'))}/{quote(name)}"
