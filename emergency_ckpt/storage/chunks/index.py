"""The places of chunks in the files of an OCDBT database, as TensorStore decodes its nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from emergency_ckpt.core.restore.storage_read import StoredArray, runs_of
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.storage.calls import result_by
from emergency_ckpt.types import LeafSpec, ShardId
from emergency_ckpt.work_progress import WorkProgress

_MOST_NODES = 4096
_METADATA = ".zarray"
_PLAIN_NUMBER = re.compile(r"[<|][biufc][0-9]{1,2}", re.ASCII)
"""numpy's names of dtypes whose values are plain numbers in this byte order."""


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

        None when there is no database, or it is in a form that this class does not know. Errors of
        TensorStore pass through; DeadlineExceeded when nothing moves any more.
        """
        if "://" in item:
            return None
        nodes = _Nodes(item, progress)
        try:
            entries = nodes.entries()
        except (KeyError, IndexError, TypeError, UnicodeDecodeError):
            return None
        return None if entries is None else cls(item, entries)

    def describe(self, path: str, name: str) -> tuple[LeafSpec, StoredArray] | None:
        """Return the array ``name`` of the leaf ``path``; None when it is not here in full.

        The array is then to be opened with TensorStore.
        """
        document = self._entries.get(f"{name}/{_METADATA}")
        if not isinstance(document, bytes):
            return None
        form = _form_of(document)
        if form is None:
            return None
        array = StoredArray(
            name=name,
            shape=form.shape,
            chunk_shape=form.chunk_shape,
            item_bytes=form.dtype.itemsize,
            plain=form.is_plain,
        )
        return LeafSpec(path, form.dtype.name, form.shape), array

    def parts_of(self, shard: ShardId, array: StoredArray) -> list[bytes | Stretch] | None:
        """Return the bytes of a box in their order: small chunks, and the places of others.

        None when TensorStore must read it, also when a chunk is missing or has another size than it
        should.
        """
        runs = runs_of(shard.box, array) if array.plain else None
        if runs is None:
            return None
        chunk_bytes = int(np.prod(array.chunk_shape)) * array.item_bytes
        found: list[bytes | Stretch] = []
        for run in runs:
            key = ".".join(map(str, run.chunk)) or "0"
            value = self._entries.get(f"{array.name}/{key}", b"")
            nbytes = value.nbytes if isinstance(value, Stretch) else len(value)
            if nbytes != chunk_bytes:
                return None
            if isinstance(value, Stretch):
                found.append(Stretch(f"{self._item}/{value.file}", value.offset, run.nbytes))
            else:
                found.append(value[: run.nbytes])
        return found


class _Form(NamedTuple):
    """An array's metadata."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_plain: bool


@lru_cache(1024)  # thousands of arrays have few forms
def _form_of(document: bytes) -> _Form | None:
    """Return the decoded metadata; None for those that TensorStore must decode."""
    try:
        found: dict[str, Any] = json.loads(document)
        shape = tuple(int(size) for size in found["shape"])
        chunks = tuple(int(size) for size in found["chunks"])
        dtype = _dtype_of(found["dtype"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if dtype is None or len(chunks) != len(shape) or min(chunks, default=1) < 1:
        return None
    is_plain = (
        found.get("zarr_format") == 2
        and found.get("compressor", "") is None
        and found.get("filters", "") is None
        and found.get("order") == "C"
        and found.get("dimension_separator", ".") == "."
    )
    return _Form(shape, chunks, dtype, is_plain)


class _Nodes:
    def __init__(self, item: str, progress: WorkProgress) -> None:
        self._item = item
        self._progress = progress
        self._base = self._wait(
            tensorstore.KvStore.open({"driver": "file", "path": f"{item.rstrip('/')}/"})
        )

    def entries(self) -> dict[str, bytes | Stretch] | None:
        manifest = self._wait(tensorstore.ocdbt.dump(self._base))
        if not manifest.get("versions"):
            return None  # the versions are in files of their own
        found: dict[str, bytes | Stretch] = {}
        # By location, the beginning of all keys below it.
        nodes = [(manifest["versions"][-1]["root"]["location"], b"")]
        for count, (location, prefix) in enumerate(nodes):
            if count >= _MOST_NODES:
                return None
            node = self._wait(tensorstore.ocdbt.dump(self._base, location))
            for entry in node["entries"]:
                if "location" in entry:
                    below = prefix + bytes(entry["subtree_common_prefix"])
                    nodes.append((entry["location"], below))
                    continue
                key = (prefix + bytes(entry["key"])).decode()
                if "inline_value" in entry:
                    found[key] = bytes(entry["inline_value"])
                    continue
                place = _place_of(entry["indirect_value"])
                if place is None:
                    return None
                found[key] = place
        return found

    def _wait(self, future: Any) -> Any:
        return result_by(self._progress, future, self._item)


def _place_of(location: str) -> Stretch | None:
    """Return the place of ``value:<folder>:<file>:<offset>:<length>``; None for another form."""
    kind, *names, offset, nbytes = location.split(":")
    # A percent sign begins an escaped character, which no name of TensorStore's own has.
    file = "".join(names)
    is_below = not file.startswith("/") and ".." not in Path(file).parts
    if kind != "value" or len(names) != 2 or "%" in file or not is_below:
        return None
    return Stretch(file, int(offset), int(nbytes))


def _dtype_of(text: object) -> np.dtype[Any] | None:
    """Return the dtype of an array's metadata; None for one that TensorStore must read."""
    if not isinstance(text, str):
        return None
    try:
        return np.dtype(text) if _PLAIN_NUMBER.fullmatch(text) else dtype_named(text)
    except TypeError:
        return None  # of a size that numpy has not
    except CorruptData:
        return None
