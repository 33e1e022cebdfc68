"""Chunks of an uncompressed step on a file system, read directly from its files.

TensorStore reads a chunk into new memory and copies the chunk into a new array; the copy into RAM
is the third. New memory costs more than the rest of such a read. So TensorStore only gives the
places of the chunks (``ChunkIndex``), and ``read_into`` reads them, with a CRC32C of each box. Each
thread reads into a small buffer of its own, which stays in the core's cache until the bytes are in
their place. A thread that still waits for a file system after the deadline is left behind, and the
bytes of that thread are not used.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorstore

from emergency_ckpt import _native
from emergency_ckpt.core.restore.storage_read import StoredArray, runs_of
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.storage.calls import NOT_IN_TIME, result_by
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

_MOST_NODES = 4096
_METADATA = ".zarray"
_PLAIN_NUMBER = re.compile(r"[<|][biufc][0-9]{1,2}", re.ASCII)
"""numpy's names of dtypes whose values are plain numbers in little-endian byte order."""
_PIECE_BYTES = 512 << 10
_OPEN_FILES = 64


class Stretch(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    nbytes: int


class ChunkIndex:
    """The values and places of all keys of a database, as of its newest version.

    Args:
      entries: by key, the value itself, or its place in a file below ``item``.
    """

    def __init__(self, item: str, entries: Mapping[str, bytes | Stretch]) -> None:
        self._item = item
        self._entries = entries

    @classmethod
    def open(cls, item: str, progress: WorkProgress) -> ChunkIndex | None:
        """Read the nodes of the database in the folder ``item``. Blocks.

        None when there is no database, or its form is not known to this class. Errors of
        TensorStore pass through; DeadlineExceeded when nothing moves any more.
        """
        if "://" in item:
            return None
        try:
            entries = _entries_of(item, progress)
        except (KeyError, IndexError, TypeError, UnicodeDecodeError):
            return None
        return None if entries is None else cls(item, entries)

    def form_of(self, name: str) -> ArrayForm | None:
        """Return the metadata of the array ``name``; None when TensorStore must open the array.

        TensorStore must where the metadata are not in a node, or have a form not known here.
        """
        document = self._entries.get(f"{name}/{_METADATA}")
        return _form_of(document) if isinstance(document, bytes) else None

    def parts_of(self, shard: ShardId, array: StoredArray) -> list[bytes | Stretch] | None:
        """Return the parts of a box in their order: the bytes of small chunks, else their places.

        None when TensorStore must read the box, as when a chunk is missing or has a wrong size.
        """
        runs = runs_of(shard.box, array) if array.plain else None
        if runs is None:
            return None
        chunk_bytes = int(np.prod(array.chunk_shape)) * array.item_bytes
        parts: list[bytes | Stretch] = []
        for run in runs:
            key = ".".join(map(str, run.chunk)) or "0"
            value = self._entries.get(f"{array.name}/{key}", b"")
            nbytes = value.nbytes if isinstance(value, Stretch) else len(value)
            if nbytes != chunk_bytes:
                return None
            if isinstance(value, Stretch):
                parts.append(Stretch(f"{self._item}/{value.file}", value.offset, run.nbytes))
            else:
                parts.append(value[: run.nbytes])
        return parts


class ArrayForm(NamedTuple):
    """An array's metadata. ``is_plain``: see ``StoredArray.plain``."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_plain: bool


@lru_cache(1024)  # thousands of arrays have few forms
def _form_of(document: bytes) -> ArrayForm | None:
    """Return the decoded metadata; None where TensorStore must decode them."""
    try:
        metadata: dict[str, Any] = json.loads(document)
        shape = tuple(int(size) for size in metadata["shape"])
        chunks = tuple(int(size) for size in metadata["chunks"])
        name = metadata["dtype"]
        dtype = np.dtype(name) if _PLAIN_NUMBER.fullmatch(name) else dtype_named(name)
    except (CorruptData, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if len(chunks) != len(shape) or min(chunks, default=1) < 1:
        return None
    is_plain = (
        metadata.get("zarr_format") == 2
        and metadata.get("compressor", "") is None
        and metadata.get("filters", "") is None
        and metadata.get("order") == "C"
        and metadata.get("dimension_separator", ".") == "."
    )
    return ArrayForm(shape, chunks, dtype, is_plain)


def _entries_of(item: str, progress: WorkProgress) -> dict[str, bytes | Stretch] | None:
    """Return the entries of the database in ``item``; None for a form that is not known here."""
    folder = {"driver": "file", "path": f"{item.rstrip('/')}/"}
    base = result_by(progress, tensorstore.KvStore.open(folder), item)
    manifest = result_by(progress, tensorstore.ocdbt.dump(base), item)
    if not manifest.get("versions"):
        return None  # the versions are in separate files
    values: dict[str, bytes | Stretch] = {}
    # A node here is its location, and the beginning of all keys below the node.
    nodes = [(manifest["versions"][-1]["root"]["location"], b"")]
    for count, (location, prefix) in enumerate(nodes):
        if count >= _MOST_NODES:
            return None
        node = result_by(progress, tensorstore.ocdbt.dump(base, location), item)
        for entry in node["entries"]:
            if "location" in entry:
                below = prefix + bytes(entry["subtree_common_prefix"])
                nodes.append((entry["location"], below))
                continue
            key = (prefix + bytes(entry["key"])).decode()
            if "inline_value" in entry:
                values[key] = bytes(entry["inline_value"])
                continue
            place = _place_of(entry["indirect_value"])
            if place is None:
                return None
            values[key] = place
    return values


def _place_of(location: str) -> Stretch | None:
    """Return the place of ``value:<folder>:<file>:<offset>:<length>``; None for another form."""
    kind, *names, offset, nbytes = location.split(":")
    # A percent sign begins an escaped character, which TensorStore's own names never have.
    file = "".join(names)
    is_below = not file.startswith("/") and ".." not in Path(file).parts
    if kind != "value" or len(names) != 2 or "%" in file or not is_below:
        return None
    return Stretch(file, int(offset), int(nbytes))


class Sink(Protocol):
    """A place that takes bytes. Thread-safe."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``. Raises when the place was closed, or has no room."""
        ...


class FileBox(NamedTuple):
    """The bytes of a box in their order, and the offset at which they go into the sink."""

    parts: Sequence[bytes | Stretch]
    offset: int


class _Piece(NamedTuple):
    box: int
    part: bytes | Stretch
    nbytes: int
    into: int


def read_into(
    boxes: Sequence[FileBox], sink: Sink, *, threads: int, progress: WorkProgress
) -> list[int]:
    """Read all boxes; return the CRC32C of the bytes of each box. Blocks.

    OSError for a file that cannot be read; CorruptData for a file that is too short;
    DeadlineExceeded when nothing moves any more. Errors of ``sink`` pass through.
    """
    reading = _Reading(_cut(boxes), sink, progress)
    for number in range(min(threads, len(reading.pieces))):
        name = f"eckpt-read-{number}"
        threading.Thread(target=reading.work, name=name, daemon=True).start()
    crcs = [0] * len(boxes)
    for piece, crc in zip(reading.pieces, reading.wait(), strict=True):
        crcs[piece.box] = _native.crc32c_combine(crcs[piece.box], crc, piece.nbytes)
    return crcs


def _cut(boxes: Sequence[FileBox]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for number, box in enumerate(boxes):
        into = box.offset
        for part in box.parts:
            if isinstance(part, bytes):
                pieces.append(_Piece(number, part, len(part), into))
                into += len(part)
                continue
            file, offset, nbytes = part
            for at in range(0, nbytes, _PIECE_BYTES):
                piece = Stretch(file, offset + at, min(_PIECE_BYTES, nbytes - at))
                pieces.append(_Piece(number, piece, piece.nbytes, into + at))
            into += nbytes
    return pieces


class _Reading:
    """The state that the threads of one ``read_into`` share."""

    def __init__(self, pieces: list[_Piece], sink: Sink, progress: WorkProgress) -> None:
        self.pieces = pieces
        self._progress = progress
        self._sink = sink
        self._crcs: list[int] = [0] * len(pieces)
        self._changed = threading.Condition()
        self._next = 0
        self._done = 0
        self._error: BaseException | None = None
        self._is_cancelled = False

    def wait(self) -> list[int]:
        """Return the CRC32C of each piece when all are read; else raise, and read no more."""
        with self._changed:
            try:
                while self._error is None and self._done < len(self.pieces):
                    is_told = self._changed.wait(self._progress.left_s)
                    if not is_told and time.monotonic() >= self._progress.deadline_s:
                        raise self._progress.error("read", "files of a step", NOT_IN_TIME)
            finally:
                self._is_cancelled = True
            if self._error is not None:
                raise self._error
            return self._crcs

    def work(self) -> None:
        """Read pieces until none is left. Runs in threads of its own."""
        files = _Files()
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            while (number := self._take()) is not None:
                piece = self.pieces[number]
                data = buffer[: piece.nbytes]
                if isinstance(piece.part, Stretch):
                    files.read(piece.part, data)
                else:
                    data[:] = piece.part
                if self._is_cancelled:
                    return
                crc = _native.crc32c(data)
                self._sink.write(data, piece.into)
                self._progress.add(piece.nbytes)
                with self._changed:
                    self._crcs[number] = crc
                    self._done += 1
                    if self._done == len(self.pieces):
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            files.close()

    def _take(self) -> int | None:
        with self._changed:
            if self._is_cancelled or self._error is not None or self._next == len(self.pieces):
                return None
            self._next += 1
            return self._next - 1


class _Files:
    """The open files of one thread. Only that thread closes them: it may be in a long read."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, part: Stretch, into: memoryview) -> None:
        fd = self._open.get(part.file)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[part.file] = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < part.nbytes:
            count = os.preadv(fd, [into[done:]], part.offset + done)
            if count == 0:
                expected = f"at least {part.offset + part.nbytes} bytes"
                raise CorruptData("read", part.file, "it is too short", expected=expected)
            done += count

    def close(self) -> None:
        for fd in self._open.values():
            with suppress(OSError):
                os.close(fd)
        self._open.clear()
