"""The write of one save into a slot: copy, stage, publish; or abort."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from absl import logging
from typing_extensions import Buffer

from emergency_ckpt import _native, files
from emergency_ckpt.errors import CorruptData, LocalTierError
from emergency_ckpt.ram.manifest import check_contents as check_manifest_contents
from emergency_ckpt.ram.manifest import (
    contents_digest,
    encode_contents,
    end_of,
    wrap_contents,
)
from emergency_ckpt.ram.process_directory import ProcessDirectory
from emergency_ckpt.ram.process_files import Published, manifest_name
from emergency_ckpt.ram.slots import Slot
from emergency_ckpt.state.dtypes import ValuePattern
from emergency_ckpt.state.lending import Loan
from emergency_ckpt.types import Contents, SaveId, Writer


class SlotFile:
    """The file of a slot, for writes by system calls from several threads at once.

    They make the pages of a slot with holes in half the time of clearing and mapping them first,
    and fail with an error, not a signal, where there is no room.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._changed = threading.Condition()
        self._writes = 0
        self._is_closed = False

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset`` in bytes. RamdiskFull, LocalTierError when closed.

        ValueError for a range outside the slot.
        """
        if offset < 0 or offset + data.nbytes > self._size_bytes:
            raise ValueError(f"{data.nbytes} bytes at {offset} are not in {self._size_bytes}")
        with self._changed:
            if self._is_closed:
                raise LocalTierError("write", "a slot", "its file was closed before")
            self._writes += 1
        try:
            while data.nbytes:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise files.local_error("write", "a slot", error, self._size_bytes) from error
        finally:
            with self._changed:
                self._writes -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the writes in progress, which do not wait for anything, and refuse later ones."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._writes == 0)
        os.close(self._fd)


class SlotWriter:
    """The right to write one save into one slot, from ``LocalTier.begin_write``.

    Not thread-safe. The save counts from ``publish`` on; after a crash before that, the slot holds
    no step and the other slots are unchanged. As a context manager it aborts on exit unless it was
    published.
    """

    def __init__(
        self,
        slot: Slot,
        save: SaveId,
        writer: Writer,
        threads: int,
        tier_lock: threading.RLock,
        place: ProcessDirectory,
    ) -> None:
        self._slot = slot
        self._save = save
        self._writer = writer
        self._threads = threads
        self._tier_lock = tier_lock
        self._place = place
        self._staged: tuple[str, Published] | None = None
        self._open = True

    @property
    def mapping(self) -> _native.Mapping:
        """Return the slot's memory, to receive into it directly."""
        self._check_open("use the mapping of")
        self._slot.reserve()
        return self._slot.mapping

    @contextlib.contextmanager
    def sparse_file(self) -> Generator[tuple[int, int] | None]:
        """Lend (descriptor, size in bytes) of a slot with holes; None for a reserved slot.

        Writes by system calls allocate the pages in half the time of clearing and mapping them
        first, and without room they fail with an error instead of a signal.
        """
        self._check_open("use the file of")
        if self._slot.reserved:
            yield None
            return
        fd = self._slot.open_file()
        try:
            yield fd, self._slot.size_bytes
        finally:
            os.close(fd)

    @property
    def made(self) -> _native.Mapping | None:
        """Return the memory of that part of a slot with holes whose pages exist; None without."""
        self._check_open("use the pages of")
        return None if self._slot.reserved else self._slot.made

    @contextlib.contextmanager
    def file(self) -> Generator[SlotFile]:
        """Lend the slot's file, also of a reserved slot, until the context ends."""
        self._check_open("use the file of")
        if self._staged is not None:
            raise self._misuse("write to", "its manifest is staged already")
        file = SlotFile(self._slot.open_file(), self._slot.size_bytes)
        try:
            yield file
        finally:
            file.close()

    def lend(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes], also before ``publish``; see ``LocalTier.lend``.

        The caller must not write to these bytes again. After ``abort`` the slot is not reused while
        the array is alive.
        """
        with self._tier_lock:
            is_published = self._staged is not None and self._slot.published is self._staged[1]
            if not is_published:
                self._check_open("lend from")
            return self._slot.lend(offset, nbytes)

    def loan(self) -> Loan:
        """Lend the slot's memory while it is being written, to read what ``copy`` has copied.

        The slot is not reused while it is on loan, whether or not the save is published.
        """
        with self._tier_lock:
            self._check_open("lend")
            return self._slot.loan()

    def copy(self, copies: Sequence[tuple[Buffer | npt.NDArray[Any], int]]) -> list[int]:
        """Copy each buffer to its offset in bytes; return the CRC32C of each. Releases the GIL.

        ValueError for a range outside the slot or a buffer that is not contiguous.
        """
        return _native.copy_crc32c(self._to_copy_to(), copies, self._threads)

    def copy_and_count(
        self,
        copies: Sequence[tuple[Buffer | npt.NDArray[Any], int]],
        patterns: Sequence[ValuePattern],
    ) -> tuple[list[int], list[int]]:
        """As ``copy``; also return how many values of each buffer fit its pattern."""
        return _native.copy_and_count(self._to_copy_to(), copies, patterns, self._threads)

    def _to_copy_to(self) -> _native.Mapping:
        self._check_open("copy to")
        if self._staged is not None:
            raise self._misuse("copy to", "its manifest is staged already")
        self._slot.reserve()
        return self._slot.mapping

    def stage(self, contents: Contents) -> str:
        """Write the manifest under a temporary name, for ``publish``; return the digest.

        All bytes must be in the slot. CorruptData when the contents break a rule of the format,
        are of another save or do not fit; RamdiskFull when there is no room.
        """
        self._check_open("stage")
        if self._staged is not None:
            raise self._misuse("stage", "it is staged already")
        self._slot.reserve()
        check_manifest_contents(contents)
        if contents.save != self._save:
            raise CorruptData(
                "stage", "manifest", "another save's", expected=self._save, actual=contents.save
            )
        if end_of(contents) > self._slot.size_bytes:
            raise CorruptData(
                "stage",
                "manifest",
                "its shards do not fit into the slot",
                expected=f"at most {self._slot.size_bytes} bytes",
                actual=f"{end_of(contents)} bytes",
            )
        encoded = encode_contents(contents)
        name = manifest_name(self._slot.number)
        temporary = ""
        if not self._slot.in_memory:
            data = wrap_contents(encoded, self._writer)
            temporary = files.write_temporary(name, self._slot.claim.dir_fd, data)
        digest = contents_digest(encoded)
        self._staged = (temporary, Published(digest=digest, encoded=encoded, contents=contents))
        return digest

    def publish(self) -> None:
        """Publish the save atomically; it survives the end of every process on the host.

        Any other slot of the same digest is unpublished. In memory it survives nothing, and takes
        no slot's place.
        """
        self._check_open("publish")
        if self._staged is None:
            raise self._misuse("publish", "its manifest is not staged")
        temporary, published = self._staged
        name = manifest_name(self._slot.number)
        with self._tier_lock:
            try:
                if not self._slot.in_memory:
                    files.rename(temporary, name, self._slot.claim.dir_fd)
            except OSError as error:
                raise files.local_error("publish", name, error) from error
            self._slot.published = published
            self._slot.writing = False
            self._open = False
            if self._slot.in_memory:
                return
            try:
                self._place.drop_twins(self._slot)
            except OSError as error:
                # The save is published; the next life removes the older slot.
                logging.warning("an older slot of step %d stays: %s", self._save.step, error)

    def abort(self) -> None:
        """Return the slot without a step. Idempotent; does nothing after ``publish``.

        A slot that could not be reserved is removed.
        """
        try:
            self._slot.reserve()
        except LocalTierError:
            with self._tier_lock:
                self._place.discard(self._slot)
        with self._tier_lock:
            if not self._open:
                return
            self._open = False
            self._slot.writing = False
            if self._slot.in_memory:
                self._place.discard(self._slot)
            elif self._staged is not None:
                with contextlib.suppress(OSError):  # the next owner removes it when it opens
                    files.remove(self._staged[0], self._slot.claim.dir_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    def _check_open(self, operation: str) -> None:
        if not self._open:
            raise self._misuse(operation, "it was published or aborted before")

    def _misuse(self, operation: str, problem: str) -> LocalTierError:
        return LocalTierError(
            operation, f"slot {self._slot.number}, step {self._save.step}", problem
        )
