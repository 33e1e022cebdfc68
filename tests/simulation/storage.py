"""The persistent tier's storage: a directory whose calls take time, fail, and end half done.

Markers, host states, removal and moves aside are the product's. The arrays of a step, which Orbax
and TensorStore write with threads of their own, are in files of this module: each writer writes
its boxes below a temporary name, and the first writer renames the step when all have.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sim
import threads
from etils.epath import backend
from orbax.checkpoint import utils as ocp_utils

from emergency_ckpt import _native as native

MANIFEST = "manifest.ocdbt"
METADATA = "_CHECKPOINT_METADATA"
ITEM = "state"

_NUMBERED = re.compile(r"/host_state/(run|log)/\d{12}\.json$")
_READS = ("exists", "isdir", "listdir", "glob", "stat")
_CHANGES = ("makedirs", "mkdir", "remove", "rename", "replace")


class Behaviour:
    """How long a call takes, and whether it fails; set by the history for each life.

    ``fault`` returns "", "lost" (no effect), "unheard" (an effect, then an error) or "full".
    ``create_fault`` too, for creates that need the name to be free. ``before``: called before each
    call, with "call" or "create". ``created``: the first bytes of each numbered file, which must
    not change, by path. ``again``: those that a late writer has made again after their removal.
    """

    def __init__(self) -> None:
        self.delay: Callable[[], float] = lambda: 0.0
        self.fault: Callable[[], str] = lambda: ""
        self.create_fault: Callable[[], str] = lambda: ""
        self.before: Callable[[str], None] = lambda what: None
        self.created: dict[str, bytes] = {}
        self.again: set[str] = set()
        self.listing_late_s = 0.0
        self._listings: dict[tuple[str, str], tuple[float, set[str]]] = {}

    def listed(self, folder: str, names: set[str]) -> set[str]:
        """Return what a host sees of a folder that has ``names``: as a file server's client."""
        key, now_s = (sim.scheduler.here().process.host.name, folder), sim.scheduler.now_s
        at_s, seen = self._listings.get(key, (-1e9, names))
        if now_s - at_s >= self.listing_late_s:
            at_s, seen = self._listings[key] = (now_s, names)
        return set(seen)

    def wrote(self, path: Any, data: bytes) -> None:
        """Note that the running task's host has written a file."""
        self.changed(path)
        self.note_created(path, data)

    def note_created(self, path: Any, data: bytes) -> None:
        """Note the first bytes of a numbered file."""
        if _NUMBERED.search(str(path)):
            self.created.setdefault(str(path), data)

    def changed(self, path: Any) -> None:
        """Note that the running task's host has changed a folder: it sees it as it is."""
        host = sim.scheduler.here().process.host.name
        self._listings.pop((host, os.path.dirname(str(path))), None)


behaviour = Behaviour()


def begin() -> None:
    """Forget the storage of the history before."""
    behaviour.__init__()


def _arrive(path: Any) -> str:
    scheduler = sim.scheduler
    if scheduler.current is None or "eckpt-simulation" not in str(path):
        return ""
    behaviour.before("call")
    scheduler.call(behaviour.delay())
    return behaviour.fault()


def _raise(kind: str, path: Any) -> None:
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    raise OSError(errno.EIO, "Input/output error", str(path))


def _wrapped(real: Callable[..., Any], changes: bool) -> Callable[..., Any]:
    def call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        kind = _arrive(path)
        if kind == "lost" or (kind == "full" and changes):
            _raise(kind, path)
        result = real(self, path, *args, **kwargs)
        if changes and sim.scheduler.current is not None:
            for each in (path, *args[:1]):
                behaviour.changed(each)
        if kind == "unheard":
            _raise(kind, path)
        return result

    return call


class _Upload(io.BytesIO):
    """A file being written: empty at first, whole when it is closed."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._path = path
        with open(path, "wb"):
            pass

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            write(self._path, data)


def write(path: Any, data: bytes) -> None:
    """Write a file of storage."""
    kind = _arrive(path)
    if kind in ("lost", "full"):
        _raise(kind, path)
    with open(path, "wb") as file:
        file.write(data)
    if sim.scheduler.current is not None:
        behaviour.wrote(path, data)
    if kind == "unheard":
        _raise(kind, path)


def _open(self: Any, path: Any, mode: str) -> Any:
    del self
    kind = _arrive(path)
    if kind in ("lost", "unheard"):
        _raise(kind, path)
    if sim.scheduler.current is not None and mode == "wb":
        return _Upload(path)
    return open(path, mode, encoding=None if "b" in mode else "utf-8")


def _remove_tree(self: Any, path: Any) -> None:
    """Remove a folder file by file, so that a crash leaves some of it."""
    if not os.path.isdir(path):
        self.remove(path)
        return
    for name in sim.scheduler.random.sample(sorted(os.listdir(path)), len(os.listdir(path))):
        _remove_tree(self, os.path.join(path, name))
    if _arrive(path):
        _raise("lost", path)
    os.rmdir(path)


def _create(real: Callable[..., None]) -> Callable[..., None]:
    """Return a create that needs the name to be free, whose answer may be lost."""

    def create(path: Any, data: bytes, **options: Any) -> None:
        behaviour.before("create")
        kind = _arrive(path) or behaviour.create_fault()
        if kind in ("lost", "full"):
            _raise(kind, path)
        if str(path) in behaviour.created and not os.path.exists(path):
            behaviour.again.add(str(path))
        try:
            real(path, data, **options)
        finally:  # also of a writer that is killed right after
            if os.path.exists(path) and Path(path).read_bytes() == data:
                behaviour.note_created(path, data)
        behaviour.changed(path)
        if kind == "unheard":
            _raise(kind, path)

    return create


def _is_finalized(path: Any) -> bool:
    """Return what Orbax's function does on a file system, without threads of its own."""
    if not path.exists() or not path.is_dir():
        raise ValueError(f"{path} is no directory")
    return ".orbax-checkpoint-tmp" not in path.name


def _names_in(real: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def names_in(self: Any, below: str = "", deadline_s: float | None = None) -> set[str]:
        return behaviour.listed(str(self.path / below), real(self, below, deadline_s))

    return names_in


def install() -> None:
    """Put the simulated storage in the place of the file system and of Orbax. Once."""
    kind: Any = type(backend.os_backend)
    for name in _READS + _CHANGES:
        setattr(kind, name, _wrapped(getattr(kind, name), name in _CHANGES))
    kind.open = _open
    kind.rmtree = _remove_tree
    _replace(ocp_utils, "is_checkpoint_finalized", _is_finalized)
    directory = _module("storage.directory")
    _replace(directory, "_link_new", _create(directory._link_new))
    names_in = directory.StorageDirectory.names_in
    _replace(directory.StorageDirectory, "names_in", _names_in(names_in))
    reader = _module("storage.orbax_reader")
    _replace(reader, "open_by_name", _open_by_name)
    _replace(reader, "describe_item", lambda item: _open_by_name(item, (), 0.0))
    _replace(reader, "BoxReader", _BoxReader)
    state = _module("storage.item.state")
    _replace(state, "item_state", lambda tree, shards, writers: shards)
    _replace(_module("storage.item.array_writes"), "ArrayWrites", _ArrayWrites)
    _replace(_module("storage.step_writer"), "StepWriter", _StepWriter)


def _replace(module: Any, name: str, value: Any) -> None:
    assert hasattr(module, name), f"{module.__name__} has no {name} any more"
    setattr(module, name, value)


def _module(name: str) -> Any:
    return sys.modules[f"emergency_ckpt.{name}"]


class _ArrayWrites:
    """The right to write the arrays of one step, until it is cancelled."""

    def __init__(self, *, progress: Any, **_: Any) -> None:
        self.is_cancelled = False
        self.progress = progress

    def check(self) -> None:
        if self.is_cancelled:
            error = _module("errors").PersistentTierError
            raise error("save", "a step", "the save was cancelled")

    def cancel(self) -> None:
        self.is_cancelled = True

    def database_of(self, process: int) -> str:
        return f"part_{process}"


class _StepWriter:
    """The write of a step as files of the simulation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._work = lambda: _write_step(*args, **options)

    def write(self) -> None:
        self._work()


def _write_step(
    target: Any,
    save: Any,
    states: Any,
    writers: Any,
    writes: _ArrayWrites,
    *,
    meet: Callable[[str], None],
    **_: Any,
) -> None:
    me = sim.scheduler.here().process.index
    first = writers[0]
    temporary = target.parent / f"{target.name}.orbax-checkpoint-tmp"
    if me == first:
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        if temporary.exists():
            temporary.rmtree()
        (temporary / ITEM).mkdir(parents=True)
    meet("tensors_begun")
    boxes: list[Any] = []
    data = b""
    (state,) = states.values()
    for shard, each in state.items():
        writes.check()
        part = np.ascontiguousarray(each.view)
        shape = [stop - start for start, stop in shard.box]
        boxes.append([shard.leaf, shard.box, str(part.dtype), shape, len(data), part.nbytes])
        data += part.tobytes()
        writes.progress.touch(part.nbytes)
    head = json.dumps(boxes).encode()
    writes.check()
    write(temporary / ITEM / writes.database_of(me), len(head).to_bytes(8, "big") + head + data)
    if me != first:
        meet("tensors_written")
        return
    meet("tensors_written")
    writes.check()
    identity = f"{save.incarnation} {save.step} {sim.scheduler.random.random()}"
    write(temporary / ITEM / MANIFEST, identity.encode())
    ours = {"emergency_ckpt": {"run_id": save.run_id, "incarnation": save.incarnation}}
    metadata = {
        "commit_timestamp_nsecs": int(threads.wall_s() * 1e9),
        "custom_metadata": ours,
        "is": identity,
    }
    write(temporary / METADATA, json.dumps(metadata).encode())
    writes.check()
    temporary.rename(target)


def boxes_of(item: Path) -> Iterator[tuple[str, tuple[tuple[int, int], ...], Any]]:
    """Yield (leaf, box, values) of all parts of a stored item."""
    for path in sorted(item.glob("part_*")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "big")
        for leaf, box, dtype, shape, start, nbytes in json.loads(raw[8 : 8 + length]):
            part = raw[8 + length + start : 8 + length + start + nbytes]
            values = np.frombuffer(part, dtype).reshape(shape)
            yield leaf, tuple((first, last) for first, last in box), values


def _open_by_name(item: Any, paths: Any, deadline_s: float) -> Any:
    del paths, deadline_s
    _arrive(item)
    reader = _module("storage.orbax_reader")
    spec = _module("types").LeafSpec
    found: dict[str, Any] = {}
    for leaf, box, values in boxes_of(Path(item)):
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
        self._item = Path(item)
        self._arrays = arrays
        self._progress = progress

    def read(self, shards: Any) -> Iterator[tuple[Any, Any]]:
        if _arrive(self._item):
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
            sim.scheduler.call(behaviour.delay())
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
