"""The writes of a process's parts into its own database, and their merge into the item's."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorstore

from emergency_ckpt.core.step_names import MANIFEST
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage.calls import wait_for
from emergency_ckpt.storage.item import ItemArray, NamedArray, StoredPart
from emergency_ckpt.storage.orbax_reader import kvstore_of
from emergency_ckpt.work_progress import WorkProgress

DATA_FILE_BYTES = 64 << 20
"""A data file is written once it has so many bytes; several files are written at a time."""

_NODE_BYTES = 100_000_000  # one node for all arrays, as Orbax has it
_INLINE_BYTES = 1024  # the metadata of an array, not its chunks
_NODE_CACHE_BYTES = 100_000_000
_FILES_AT_ONCE = 128
_METADATA_KEY = ".zarray"
_COUNTED_EVERY_S = 1.0
_DRIVERS = ("file", "gcs", "gcs_grpc")
"""The only metrics that are read, and only in slow saves: TensorStore never frees an answer."""


class _Piece(NamedTuple):
    array: NamedArray
    parts: tuple[StoredPart, ...]


class _Kind(NamedTuple):
    """The common part of arrays of one shape, dtype and division; ``metadata``: their file."""

    spec: tensorstore.Spec
    metadata: bytes


class ArrayWrites:
    """The writes of one process's parts of a step. For one save.

    Args:
      attempt: as ``new_attempt`` returns it, the same on all writers.
      creates: True for the first writer, which also writes the metadata of the arrays.
      at_once_bytes: maximum number of bytes in one transaction; a larger part has its own.
      progress: counts the bytes that TensorStore writes.

    Attributes:
      is_cancelled: True once the save was cancelled.
    """

    def __init__(
        self, *, attempt: str, creates: bool, at_once_bytes: int, progress: WorkProgress
    ) -> None:
        self.attempt = attempt
        self._creates = creates
        self._at_once_bytes = at_once_bytes
        self._progress = progress
        self._counted_s = time.monotonic()
        self._written_bytes: int | None = None  # when counted last
        self._uncounted_bytes = 0  # of the batch that is being written
        self.is_cancelled = False
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def database_of(self, process: int) -> str:
        """Return the name of a writer's database, a folder below the item.

        Orbax permits any letters and digits as the number of a process. Here the name includes the
        attempt, because TensorStore may still write for an attempt that was given up, or for a life
        that has hung: then into a database that no other attempt reads, even of the same save.
        """
        return f"ocdbt.process_{process}x{self.attempt}"

    def check(self) -> None:
        """Raise PersistentTierError once the save is cancelled, since storage may answer later."""
        if self.is_cancelled:
            raise PersistentTierError("save", "a step", "the save was cancelled")

    def cancel(self) -> None:
        """Begin no more commits, and wait for none. Thread-safe; does not block."""
        self.is_cancelled = True

    def open(self, database: dict[str, Any], context: tensorstore.Context) -> tensorstore.KvStore:
        """Return the opened database of a spec. Blocks, until the save is cancelled."""
        return self.result(tensorstore.KvStore.open(database, context=context))

    def write_into(self, database: tensorstore.KvStore, arrays: Sequence[NamedArray]) -> None:
        """Write this process's parts into ``database``; return when they are in storage. Blocks.

        Errors of TensorStore pass through; PersistentTierError once the save is cancelled.
        """
        created: set[str] = set()
        for array in arrays:
            for part in array.array.parts:
                self._progress.expect(0, piece_bytes=part.nbytes)
        for batch in _batches(arrays, self._at_once_bytes, all_arrays=self._creates):
            self._uncounted_bytes = sum(part.nbytes for piece in batch for part in piece.parts)
            self._write_batch(database, batch, created)
            self._progress.touch(self._uncounted_bytes)

    def _write_batch(
        self, database: tensorstore.KvStore, batch: Sequence[_Piece], created: set[str]
    ) -> None:
        """Write a batch in one commit of the database."""
        transaction = tensorstore.Transaction(atomic=True)
        commit: Any = None
        try:
            self._begin(database.with_transaction(transaction), batch, created)
            self.check()
            commit = transaction.commit_async()
            self.result(commit)
        except BaseException:
            transaction.abort()
            if commit is not None:
                # Otherwise files would come back into a folder that is being removed, as they still
                # may after a cancelled save.
                wait_for(commit, self._is_over)
            raise

    def _begin(
        self, database: tensorstore.KvStore, batch: Sequence[_Piece], created: set[str]
    ) -> None:
        """Open the arrays of a batch and pass their parts to TensorStore, for the commit."""
        opening = [self._open(database, piece.array, created) for piece in batch]
        writes = [
            store[tuple(slice(start, stop) for start, stop in part.box)].write(
                part.load(), can_reference_source_data_indefinitely=True
            )
            for store, piece in zip(map(self.result, opening), batch, strict=True)
            for part in piece.parts
        ]
        for write in writes:
            self.result(write)

    def _open(self, database: tensorstore.KvStore, named: NamedArray, created: set[str]) -> Any:
        name, array = named
        kind = self._kind(array)
        # As TensorStore does itself with a path.
        folder = "" if name in ("", "/") else name if name.endswith("/") else f"{name}/"
        if self._creates and name not in created:
            created.add(name)
            # Without a condition: a commit whose reply was lost is repeated over its own result.
            self.result(database.write(f"{folder}{_METADATA_KEY}", kind.metadata))
        return tensorstore.open(
            kind.spec, kvstore=database + folder, open=True, assume_metadata=True
        )

    def result(self, future: Any) -> Any:
        """Return the result of TensorStore's ``future``; PersistentTierError once cancelled."""
        wait_for(future, self._is_over)
        if not future.done():
            future.cancel()
            self.check()
        self._progress.touch()
        return future.result()

    def _is_over(self) -> bool:
        if time.monotonic() - self._counted_s >= _COUNTED_EVERY_S:
            self._count()
        return self.is_cancelled

    def _count(self) -> None:
        """Note the bytes written since the last count: futures report only their ends."""
        self._counted_s = time.monotonic()
        before, self._written_bytes = self._written_bytes, _written_bytes()
        if before is not None and self._written_bytes > before:
            counted = min(self._written_bytes - before, self._uncounted_bytes)
            self._uncounted_bytes -= counted
            self._progress.touch(counted)

    def _kind(self, array: ItemArray) -> _Kind:
        key = (array.shape, array.dtype, array.chunk_shape)
        if key in self._kinds:
            return self._kinds[key]
        spec = tensorstore.Spec(
            {
                "driver": "zarr",
                "dtype": array.dtype,
                "metadata": {"shape": array.shape, "chunks": array.chunk_shape, "compressor": None},
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
                # A missing chunk is then an error for a reader, and never zeros.
                "store_data_equal_to_fill_value": True,
            }
        )
        memory = tensorstore.KvStore.open("memory://").result()
        tensorstore.open(spec, kvstore=memory, create=True).result()
        kind = self._kinds[key] = _Kind(spec, memory[_METADATA_KEY])
        return kind


def _written_bytes() -> int:
    """Return the bytes of complete files that TensorStore has written in this process."""
    metrics = (
        metric
        for driver in _DRIVERS
        for metric in tensorstore.experimental_collect_matching_metrics(
            f"/tensorstore/kvstore/{driver}/bytes_written"
        )
    )
    return sum(metric["values"][0]["value"] for metric in metrics)


def _batches(
    arrays: Iterable[NamedArray], at_once_bytes: int, *, all_arrays: bool
) -> Iterator[list[_Piece]]:
    """Yield the parts to write, in batches that fit; ``all_arrays``: also arrays without parts."""
    batch: list[_Piece] = []
    size_bytes = 0
    for named in arrays:
        parts: list[StoredPart] = []
        for part in named.array.parts:
            if size_bytes and size_bytes + part.nbytes > at_once_bytes:
                yield [*batch, _Piece(named, tuple(parts))] if parts else batch
                batch, parts, size_bytes = [], [], 0
            parts.append(part)
            size_bytes += part.nbytes
        if parts or all_arrays:
            batch.append(_Piece(named, tuple(parts)))
    if batch:
        yield batch


def published_database_spec(folder: str) -> dict[str, Any]:
    """Return TensorStore's spec of a writer's OCDBT database whose manifest is a file."""
    base: Any = kvstore_of(folder)
    # Data files have names of their own; only the manifest must appear at once.
    return database_spec(base | {"file_io_locking": {"mode": "non_atomic"}}) | {"manifest": base}


def database_spec(base: dict[str, Any] | str) -> dict[str, Any]:
    """Return TensorStore's spec of a writer's OCDBT database in ``base``."""
    return {
        "driver": "ocdbt",
        "base": base,
        "cache_pool": "cache_pool#ocdbt",
        "assume_config": True,
        "target_data_file_size": DATA_FILE_BYTES,
        "config": {
            "max_inline_value_bytes": _INLINE_BYTES,
            "max_decoded_node_bytes": _NODE_BYTES,
            "manifest_kind": "single",
        },
    }


def new_context() -> tensorstore.Context:
    """Return TensorStore's resources for the database of one save."""
    return tensorstore.Context(
        {
            "cache_pool#ocdbt": {"total_bytes_limit": _NODE_CACHE_BYTES},
            "file_io_concurrency": {"limit": _FILES_AT_ONCE},
        }
    )


class UnpublishedDatabase:
    """A database in ``folder``. Blocks for storage, until the save is cancelled.

    TensorStore writes data and nodes under random names, but would read a manifest that another
    writer has left in the folder. So the manifest stays in memory: the caller creates the file.
    """

    def __init__(self, folder: str, writes: ArrayWrites) -> None:
        self._writes = writes
        self._context = new_context()
        spec = database_spec(kvstore_of(folder)) | {"manifest": {"driver": "memory"}}
        self.store = writes.open(spec, self._context)

    def merge(self, folders: Sequence[str]) -> None:
        """Copy all keys of the databases in ``folders``; the data stay where they are."""
        if not folders:
            return
        specs = [database_spec(kvstore_of(folder)) for folder in folders]
        opening = [tensorstore.KvStore.open(spec, context=self._context) for spec in specs]
        transaction = tensorstore.Transaction(atomic=True)
        into = self.store.with_transaction(transaction)
        copies = [self._writes.result(store).experimental_copy_range_to(into) for store in opening]
        for copy in copies:
            self._writes.result(copy)
        self._writes.result(transaction.commit_async())

    def manifest(self) -> bytes | None:
        """Return the bytes of the manifest, or None when nothing was written."""
        memory = tensorstore.KvStore.open({"driver": "memory"}, context=self._context)
        result: Any = self._writes.result(self._writes.result(memory).read(MANIFEST))
        return result.value if result.state == "value" else None


def release_pages(database: str) -> None:
    """Let the kernel reuse the pages of the data files below the folder ``database``.

    A save to a disk then needs no more pages than the previous save. New pages cost several times
    as much as the write if a virtual machine must first get the pages from its host, or if memory
    must be reclaimed first. The files stay: a restore of that step reads them from the disk.
    """
    # This is only advice to the kernel: files may be missing, as in a step that is being removed.
    with contextlib.suppress(OSError), os.scandir(f"{database}/d") as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                file = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)
