"""What TensorStore does: small files under conditions, and a step's arrays in databases.

A database is a manifest, which names files of data. Each such file has some boxes of the arrays.
The order in which a step is written, and who may write what, is the product's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bucket
import numpy as np
import sim
import storage
from futures import Future

from emergency_ckpt import _native as native

MANIFEST = "manifest.ocdbt"
_COMMITS = (MANIFEST, storage.METADATA, storage.COMMITTED)
_TRIES = 5
_SAME = "the same division of all arrays"


def boxes_of(item: Path) -> Iterator[tuple[str, tuple[tuple[int, int], ...], Any]]:
    """Yield (leaf, box, values) of all parts of a stored item; nothing without its manifest."""
    manifest = item / MANIFEST
    for name in json.loads(manifest.read_bytes()) if manifest.is_file() else ():
        raw = (item / name).read_bytes()
        length = int.from_bytes(raw[:8], "big")
        for leaf, box, dtype, shape, start, nbytes in json.loads(raw[8 : 8 + length]):
            part = raw[8 + length + start : 8 + length + start + nbytes]
            values = np.frombuffer(part, dtype).reshape(shape)
            yield leaf, tuple((first, last) for first, last in box), values


class KvStore:
    """A key-value store in a folder. It tries again itself, with a growing pause."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is_bucket = "://" in folder

    def write(self, name: str, data: bytes | None, if_equal: bytes | None = None) -> Future:
        """Begin to write an object, or to delete it; its generation is empty if refused."""
        path = _local(f"{self._folder}/{name}")
        generation = None if if_equal is None else int(if_equal)

        def write() -> Any:
            if data is None:
                bucket.objects.delete(path, generation)
                return None
            made = bucket.objects.write(path, data, generation)
            if made and not self._is_bucket:
                storage.behaviour.changed(path, host)
            return SimpleNamespace(generation=str(made).encode() if made else b"")

        host = sim.scheduler.here().process.host
        return self._begin(path, write, is_change=True)

    def read(self, name: str) -> Future:
        """Begin to read an object."""
        path = _local(f"{self._folder}/{name}")

        def read() -> Any:
            generation = bucket.objects.generation_of(path)
            if not generation:
                return SimpleNamespace(state="missing")
            stamp = SimpleNamespace(generation=str(generation).encode())
            return SimpleNamespace(state="value", value=path.read_bytes(), stamp=stamp)

        return self._begin(path, read)

    def _begin(self, path: Path, act: Callable[[], Any], *, is_change: bool = False) -> Future:
        """Begin a request. What changes a bucket goes on when this process is killed."""
        behaviour, scheduler, future = storage.behaviour, sim.scheduler, Future()
        behaviour.before("commit" if is_change and path.name in _COMMITS else "call")
        scheduler.call()
        begin_s = behaviour.delay()

        here = scheduler.here().process

        def serve() -> None:
            bucket.travel(here, begin_s)
            for tried in range(_TRIES):
                kind = behaviour.fault()
                if kind == "full" and is_change and not self._is_bucket:
                    problem = "RESOURCE_EXHAUSTED: no space [os_error_code='28']"
                    future.set_exception(ValueError(problem))
                    return
                if kind not in ("lost", "full"):
                    try:
                        value = act()
                    except OSError as error:  # a folder that another process removes
                        future.set_exception(ValueError(f"FAILED_PRECONDITION: {error}"))
                        return
                    if not kind:
                        future.set_result(value)
                        return
                scheduler.sleep(1.0 * 2**tried)
            future.set_exception(ValueError(f"UNAVAILABLE: {path} does not answer"))

        survives = is_change and self._is_bucket
        scheduler.spawn(bucket.objects.server if survives else here, "tensorstore", serve)
        return future


def _wait_for(future: Future, is_over: Callable[[], bool] = lambda: False) -> None:
    while not future.done() and not is_over():
        future.wait(0.5)


def _result_of(future: Future) -> Any:
    return future.result()


class _Database:
    """The part of a database that one process writes. ``publishes``: its manifest, too."""

    def __init__(self, folder: str, *, publishes: bool = False) -> None:
        self._folder = folder
        self._publishes = publishes
        self.names: list[str] = []
        self.store = self

    def put(self, data: bytes) -> None:
        """Write a file of data."""
        name = f"d/{sim.scheduler.random.randbytes(8).hex()}"
        _result_of(KvStore(self._folder).write(name, data))
        self.names.append(name)
        if self._publishes:
            _result_of(KvStore(self._folder).write(MANIFEST, self.manifest()))

    def merge(self, folders: Sequence[str]) -> None:
        """Take over what the databases in ``folders``, below this one, have."""
        for folder in folders:
            found = _result_of(KvStore(folder).read(MANIFEST))
            if found.state != "value":
                raise ValueError(f"NOT_FOUND: {folder} has no database")
            below = folder.removeprefix(f"{self._folder}/")
            self.names += [f"{below}/{name}" for name in json.loads(found.value)]

    def manifest(self) -> bytes | None:
        """Return the manifest."""
        return json.dumps(self.names).encode() if self.names else None


class _ArrayWrites:
    """The right to write the arrays of one step, until it is cancelled."""

    def __init__(self, *, attempt: str, progress: Any, **_: Any) -> None:
        self.is_cancelled = False
        self.attempt = attempt
        self._progress = progress

    def check(self) -> None:
        if self.is_cancelled:
            error = _module("errors").PersistentTierError
            raise error("save", "a step", "the save was cancelled")

    def cancel(self) -> None:
        self.is_cancelled = True

    def database_of(self, process: int) -> str:
        return f"ocdbt.process_{process}x{self.attempt}"

    def open(self, database: _Database, context: None) -> _Database:
        del context
        return database

    def write_into(self, database: _Database, arrays: Any) -> None:
        boxes: list[Any] = []
        data = b""
        for shard, each in arrays.items():
            self.check()
            part = np.ascontiguousarray(each.view)
            shape = [stop - start for start, stop in shard.box]
            boxes.append([shard.leaf, shard.box, str(part.dtype), shape, len(data), part.nbytes])
            data += part.tobytes()
            self._progress.touch(part.nbytes)
        head = json.dumps(boxes).encode()
        self.check()
        database.put(len(head).to_bytes(8, "big") + head + data)


class _ItemTree:
    """A state as an item of a step: its shards."""

    def __init__(self, state: Any) -> None:
        self.arrays = state

    def document(self) -> str:
        return "{}"


def _open_by_name(item: Any, paths: Any, deadline_s: float) -> Any:
    del paths, deadline_s
    path = _local(item)
    if storage.arrive(path):
        storage.fail("lost", path)
    reader = _module("storage.orbax_reader")
    spec = _module("types").LeafSpec
    found: dict[str, Any] = {}
    for leaf, box, values in boxes_of(path):
        known = found.get(leaf)
        shape = tuple(stop for _, stop in box)
        if known is not None:
            shape = tuple(max(a, b) for a, b in zip(shape, known.spec.global_shape, strict=True))
        array = reader.StoredArray(
            name=leaf,
            shape=shape,
            chunk_shape=shape,
            item_bytes=values.dtype.itemsize,
            driver="zarr",
            ocdbt=True,
        )
        found[leaf] = reader.StoredLeaf(spec(leaf, values.dtype.name, shape), array)
    return found


class _BoxReader:
    """Reads boxes of a stored item."""

    def __init__(self, item: Any, arrays: Any, *, progress: Any, **_: Any) -> None:
        self._item = _local(item)
        self._arrays = arrays
        self._progress = progress

    def read(self, shards: Any) -> Iterator[tuple[Any, Any]]:
        if storage.arrive(self._item):
            raise ValueError("UNAVAILABLE: storage does not answer")
        whole: dict[str, Any] = {}
        for leaf, box, values in boxes_of(self._item):
            shape = self._arrays[leaf].shape if leaf in self._arrays else None
            if shape is not None:
                target = whole.setdefault(leaf, np.zeros(shape, values.dtype))
                target[tuple(slice(first, last) for first, last in box)] = values
        for shard in shards:
            if shard.leaf not in whole:
                raise ValueError(f"NOT_FOUND: {shard.leaf} is not stored")
            sim.scheduler.call(storage.behaviour.delay())
            index = tuple(slice(first, last) for first, last in shard.box)
            yield shard, np.ascontiguousarray(whole[shard.leaf][index])

    def read_into(self, sink: Any, boxes: Any) -> list[int]:
        offsets = dict(boxes)
        crcs: list[int] = []
        for shard, values in self.read([shard for shard, _ in boxes]):
            data = values.tobytes()
            sink.write(memoryview(data), offsets[shard])
            self._progress.add(len(data))
            crcs.append(native.crc32c(data))
        return crcs


def _local(item: Any) -> Path:
    return bucket.objects.path_of(item) if "://" in str(item) else Path(item)


def _module(name: str) -> Any:
    return sys.modules[f"emergency_ckpt.{name}"]


def install() -> None:
    """Put this in the place of TensorStore. Once."""
    reader = _module("storage.orbax_reader")
    storage.replace(reader, "open_by_name", _open_by_name)
    storage.replace(reader, "describe_item", lambda item: _open_by_name(item, (), 0.0))
    storage.replace(reader, "BoxReader", _BoxReader)
    storage.replace(_module("storage.calls"), "wait_for", _wait_for)
    small = _module("storage.step_writer")
    storage.replace(small, "wait_for", _wait_for)
    storage.replace(small, "result_of", _result_of)
    storage.replace(small, "tensorstore", SimpleNamespace(KvStore=SimpleNamespace(open=_opened)))
    storage.replace(small, "kvstore_of", lambda folder: folder)
    storage.replace(small, "_generation_of_nothing", lambda: b"0")
    state, writes = _module("storage.item"), _module("storage.array_writes")
    storage.replace(state, "item_state", lambda tree, shards, writers: shards)
    storage.replace(writes, "ArrayWrites", _ArrayWrites)
    writer = _module("storage.step_writer")
    storage.replace(writer, "ItemTree", _ItemTree)
    storage.replace(writer, "array_metadata", lambda arrays: _SAME)
    storage.replace(writer, "shardings", lambda arrays: None)
    storage.replace(writer, "UnpublishedDatabase", lambda folder, writes: _Database(folder))
    storage.replace(
        writer, "published_database_spec", lambda folder: _Database(folder, publishes=True)
    )
    storage.replace(writer, "new_context", lambda: None)


def _opened(folder: str) -> Future:
    future = Future()
    future.set_result(KvStore(folder))
    return future
