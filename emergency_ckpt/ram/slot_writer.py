"""The write of one save into a slot: copy, stage, publish; or abort."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from absl import logging
from typing_extensions import Buffer

from emergency_ckpt import _native, files
from emergency_ckpt.errors import CorruptData, LocalTierError
from emergency_ckpt.ram.manifest import (
    Published,
    check_contents,
    contents_digest,
    encode_contents,
    end_of,
    wrap_contents,
)
from emergency_ckpt.ram.process_directory import ProcessDirectory
from emergency_ckpt.ram.process_files import manifest_name
from emergency_ckpt.ram.slots import Slot
from emergency_ckpt.state.mapped import MappedMemory, Pin
from emergency_ckpt.types import Contents, SaveId, Writer


class MappedSink:
    """Mapped memory for writes from several threads at once until it is closed.

    A read from storage that was given up may still deliver: it is then refused.
    """

    def __init__(self, mapping: _native.Mapping) -> None:
        self._mapping = mapping
        self._changed = threading.Condition()
        self._writes = 0
        self._is_closed = False

    def write(self, data: memoryview, offset: int) -> None:
        """Copy all of ``data`` to ``offset`` in bytes. LocalTierError when closed.

        ValueError for a range outside of the memory.
        """
        with self._changed:
            if self._is_closed:
                raise LocalTierError("write", "memory", "it was closed before")
            self._writes += 1
        try:
            _native.copy_crc32c(self._mapping, [(data, offset)], 1)
        finally:
            with self._changed:
                self._writes -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the writes in progress, which do not wait for anything, and refuse later ones."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._writes == 0)


def writes_to(mapping: _native.Mapping) -> contextlib.closing[MappedSink]:
    """Give mapped memory to threads that write to it; they are refused once the context ends."""
    return contextlib.closing(MappedSink(mapping))


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
        self._check_unstaged("use the mapping of")
        return self._slot.mapping

    @property
    def mapped(self) -> MappedMemory:
        """Return what of the slot's memory is mapped for the devices' DMA."""
        self._check_open("use the mapping of")
        return self._slot.mapped

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy; see ``Slot.view``.

        It shows what is in the slot, also of a later save: use it before the caller, who alone has
        the slot, lets another begin.
        """
        return self._slot.view(offset, nbytes)

    def pin(self) -> Pin:
        """Pin the slot while it is being written, to read what ``copy`` has copied.

        It is not written again before the end of the pin, whether or not the save is published.
        """
        with self._tier_lock:
            self._check_open("pin")
            return self._slot.pins.pin(self._slot.mapping)

    def copy(self, copies: Sequence[tuple[Buffer | npt.NDArray[Any], int]]) -> list[int]:
        """Copy each buffer to its offset in bytes; return the CRC32C of each. Releases the GIL.

        ValueError for a range outside the slot or a buffer that is not contiguous.
        """
        return _native.copy_crc32c(self.mapping, copies, self._threads)

    def stage(self, contents: Contents) -> str:
        """Write the manifest under a temporary name, for ``publish``; return the digest.

        All bytes must be in the slot. CorruptData when the contents break a rule of the format,
        are of another save or do not fit; RamdiskFull when there is no room.
        """
        self._check_unstaged("stage")
        check_contents(contents)
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
        data = wrap_contents(encoded, self._writer)
        temporary = files.write_temporary(name, self._slot.claim.dir_fd, data)
        digest = contents_digest(encoded)
        self._staged = (temporary, Published(digest=digest, encoded=encoded, contents=contents))
        return digest

    def publish(self) -> None:
        """Publish the save atomically; it survives the end of every process on the host.

        Any other slot of the same digest is unpublished.
        """
        self._check_open("publish")
        if self._staged is None:
            raise self._misuse("publish", "its manifest is not staged")
        temporary, published = self._staged
        name = manifest_name(self._slot.number)
        with self._tier_lock:
            try:
                files.rename(temporary, name, self._slot.claim.dir_fd)
            except OSError as error:
                raise files.local_error(
                    "publish", name, error, dir_fd=self._slot.claim.dir_fd
                ) from error
            self._slot.published = published
            self._slot.writing = False
            self._open = False
            try:
                self._place.drop_twins(self._slot)
            except OSError as error:
                # The save is published; the next life removes the older slot.
                logging.warning("an older slot of step %d stays: %s", self._save.step, error)

    def abort(self) -> None:
        """Return the slot without a step. Idempotent; does nothing after ``publish``."""
        with self._tier_lock:
            if not self._open:
                return
            self._open = False
            self._slot.writing = False
            if self._staged is not None:
                with contextlib.suppress(OSError):  # the next owner removes it when it opens
                    files.remove(self._staged[0], self._slot.claim.dir_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    def _check_open(self, operation: str) -> None:
        if not self._open:
            raise self._misuse(operation, "it was published or aborted before")

    def _check_unstaged(self, operation: str) -> None:
        self._check_open(operation)
        if self._staged is not None:
            raise self._misuse(operation, "its manifest is staged already")

    def _misuse(self, operation: str, problem: str) -> LocalTierError:
        return LocalTierError(
            operation, f"slot {self._slot.number}, step {self._save.step}", problem
        )
