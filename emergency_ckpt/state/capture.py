"""A snapshot that two saves of one step share: read from the devices once."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.lending import Loan
from emergency_ckpt.state.staging import Batch, HostShard, Memory, Snapshot
from emergency_ckpt.types import ShardId


def flat_bytes(view: Memory) -> Memory:
    """Return contiguous bytes; extension types have no buffer interface of their own."""
    if type(view) is memoryview and view.c_contiguous:
        return view
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The type and the shape of a shard whose bytes were copied elsewhere."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @staticmethod
    def of(view: Memory) -> Kind:
        array = np.asarray(view)
        return Kind(array.dtype, array.shape)

    def shard(self, copied: npt.NDArray[np.uint8]) -> HostShard:
        """Return the shard whose bytes are ``copied``."""
        return HostShard(copied.view(self.dtype).reshape(self.shape), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """Shards of a step in host memory, and the CRC32C of each, from its capture.

    ``loans``: of that memory; ended by whoever knows that nobody reads it any more.
    """

    shards: dict[ShardId, HostShard]
    crcs: dict[ShardId, int]
    loans: list[Loan]

    @staticmethod
    def nothing() -> Captured:
        return Captured({}, {}, [])

    def add(self, other: Captured) -> None:
        self.shards.update(other.shards)
        self.crcs.update(other.crcs)
        self.loans.extend(other.loans)


class SharedCapture:
    """The shards that the local save of a step copies into a slot, for the persistent save too.

    The local save reads the snapshot, and lends its slot to the other. When it leaves without
    having read (no slot is free, RAM has the step already, the save is dropped), the persistent
    save reads the snapshot itself. Each side ends its interest; then the snapshot is closed.
    """

    def __init__(self, snapshot: Snapshot, shards: Sequence[ShardId]) -> None:
        """``shards``: those of ``snapshot``, in its order."""
        self.snapshot = snapshot
        self.shards = tuple(shards)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._is_wanted = True
        self._is_read = False
        self._copied: Captured | None = None

    # The local save.

    def batches(self, limit_bytes: int) -> Iterator[Batch]:
        """As ``Snapshot.batches``."""
        self._is_read = True
        return self.snapshot.batches(limit_bytes)

    @property
    def is_wanted(self) -> bool:
        """Return whether the persistent save still wants the bytes."""
        return self._is_wanted

    def hand_over(
        self, loan: Loan, shards: Mapping[ShardId, HostShard], crcs: Sequence[int]
    ) -> None:
        """Give the bytes in the slot on ``loan`` to the persistent save, if it still wants them."""
        with self._lock:
            if not self._is_wanted:
                loan.end()
                return
            crc_of = dict(zip(shards, crcs, strict=True))
            self._copied = Captured(dict(shards), crc_of, [loan])
        self._settled.set()

    def close(self) -> None:
        """End the part of the local save, in whatever way. Idempotent."""
        with self._lock:
            self._settled.set()
            if self._is_read or not self._is_wanted:
                self.snapshot.close()

    # The persistent save.

    def take(self, timeout_s: float) -> Captured | None:
        """Return what the local save has copied; None when it has left the snapshot unread.

        Waits for it. SaveFailed when it began to read and failed, or takes longer.
        """
        if not self._settled.wait(timeout_s):
            raise SaveFailed(
                "read", "snapshot", f"the local save has not read it in {timeout_s:g} s"
            )
        with self._lock:
            copied, self._copied = self._copied, None
            if copied is None and self._is_read:
                raise SaveFailed("read", "snapshot", "the local save failed while it read it")
            return copied

    def release(self) -> None:
        """End the interest of the persistent save. Idempotent."""
        with self._lock:
            self._is_wanted = False
            copied, self._copied = self._copied, None
            if self._settled.is_set():
                self.snapshot.close()
        if copied is not None:
            for loan in copied.loans:
                loan.end()
