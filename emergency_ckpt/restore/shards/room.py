"""Room for what a restore writes: what it may still need is given up last.

Where the ramdisk has none, memory of the process takes it, until the next save begins: the step
then goes to the devices, and is not in RAM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from absl import logging

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError, RamdiskFull, SlotBusy
from emergency_ckpt.ram.tier import LocalTier, SlotWriter
from emergency_ckpt.transfer.source import FileTarget, PartlyMade, Target
from emergency_ckpt.types import SaveId

_T = TypeVar("_T")


class RestoreRoom:
    """The room of one process for what one restore brings.

    Room that is free goes first, then what is of ``expendable``, then of other saves but
    ``sources``, the oldest first: an older step is second choice. Then memory is used.

    Args of its methods:
      expendable: saves of which nothing here is needed: passed over by the plan, or about to be
        read anew.
      sources: what is written is copied from these.

    Attributes:
      lack: why something is in memory instead of the ramdisk; empty while nothing is.
      check: called before RAM is changed, also by who publishes what was written; what it raises
        ends the restore.
    """

    def __init__(self, tier: LocalTier) -> None:
        self._tier = tier
        self.check: Callable[[], None] = lambda: None
        self.lack = ""

    def note_full(self, reason: str) -> None:
        """Use memory alone from now on: the ramdisk became full while it was written."""
        if not self.lack:
            logging.warning("what is restored goes into memory, not into the ramdisk: %s", reason)
        self.lack = self.lack or reason

    def begin_write(
        self,
        save: SaveId,
        size_bytes: int,
        *,
        expendable: Collection[SaveId],
        sources: Collection[SaveId] = (),
        sparse: bool = False,
    ) -> SlotWriter:
        """Return the writer of a slot for ``save``; ``sparse`` as in ``LocalTier.begin_write``."""
        tier = self._tier
        return self._find(
            expendable,
            sources,
            lambda: tier.begin_write(save, size_bytes, allow_extra=True, sparse=sparse),
            lambda: tier.begin_write_in_memory(save, size_bytes),
        )

    def publish_host_state(
        self,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        expendable: Collection[SaveId] = (),
    ) -> None:
        """Publish a document of ``save``, whose tensors here stay."""
        publish = self._tier.publish_host_state
        self._find(
            expendable,
            [save],
            lambda: publish(save, owner, count, data, restores=True),
            lambda: publish(save, owner, count, data, in_memory=True),
        )

    def _find(
        self,
        expendable: Collection[SaveId],
        sources: Collection[SaveId],
        in_ramdisk: Callable[[], _T],
        in_memory: Callable[[], _T],
    ) -> _T:
        self.check()
        if self.lack:
            return in_memory()
        held = {each.save for each in self._tier.held()[0]}
        failure: LocalTierError | None = None
        for protected in (held, held.difference(expendable), held.intersection(sources)):
            self._tier.protect(protected)
            try:
                return in_ramdisk()
            except (RamdiskFull, SlotBusy) as error:
                failure = error
        self.note_full(str(failure))
        return in_memory()


def receive_target(writer: SlotWriter, file: tuple[int, int] | None) -> Target:
    """Return what receives the slot's bytes. ``file``: from ``writer.sparse_file``, still open."""
    if file is None:
        return writer.mapping
    made = writer.made
    return FileTarget(*file) if made is None else PartlyMade(made, FileTarget(*file))


class Scratch:
    """An anonymous file: bytes are written to it, then read through views. Nothing is published.

    Its pages are allocated by the writes, which takes half the time of clearing them first. They
    are freed with the last view, or at ``close`` without views. Thread-safe for writes to the file
    only.

    Raises:
      LocalTierError: the system cannot make such a file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, size_bytes)
        try:
            self.fd = os.memfd_create("eckpt-fetched", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(size_bytes, error) from error
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._mapping = Mapping(self.fd, self.size_bytes, writable=False)
        except OSError as error:
            self.close()
            raise _no_memory(size_bytes, error) from error

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy; it keeps the memory alive."""
        return self._mapping.view(offset, nbytes, None)

    def close(self) -> None:
        """Close the file for writes; views stay valid."""
        os.close(self.fd)


def _no_memory(size_bytes: int, error: OSError) -> LocalTierError:
    return LocalTierError("make", f"{size_bytes} bytes of memory", str(error))
