"""The bytes of a step that the local save copies into its slot, for the persistent save too."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.lending import Loan
from emergency_ckpt.state.staging import Batch, HostShard, Memory, Snapshot
from emergency_ckpt.types import LeafSpec, ShardId


def flat_bytes(view: Memory) -> Memory:
    """Return contiguous bytes; extension types have no buffer interface of their own."""
    if type(view) is memoryview and view.c_contiguous:
        return view
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


class SlotCapture:
    """The snapshot that the local save of a step reads, once for both tiers.

    The local save lends its slot to the persistent save, where that wants the bytes. When it
    leaves without having read (no slot is free, RAM has the step already, the save is dropped), the
    persistent save reads the snapshot itself. Each side ends its interest; then the snapshot is
    closed.
    """

    def __init__(
        self, snapshot: Snapshot, shards: Sequence[ShardId] = (), *, is_wanted: bool = False
    ) -> None:
        """``shards``: those of ``snapshot``, in its order. ``is_wanted``: by a persistent save."""
        self.snapshot = snapshot
        self.shards = tuple(shards)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._is_wanted = is_wanted
        self._is_read = False
        self._copied: tuple[Loan, dict[ShardId, HostShard]] | None = None

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
        self, loan: Loan, leaves: Sequence[LeafSpec], layout: Layout, crcs: Sequence[int]
    ) -> None:
        """Give the bytes in the slot on ``loan`` to the persistent save, if it still wants them."""
        specs = {leaf.path: leaf for leaf in leaves}
        with self._lock:
            if not self._is_wanted:
                loan.end()
                return
            copied: dict[ShardId, HostShard] = {}
            for placed, crc in zip(layout.shards, crcs, strict=True):
                shard, memory = placed.shard, loan.view(placed.offset, placed.nbytes)
                copied[shard] = HostShard.of_bytes(memory, specs[shard.leaf], shard.box, crc)
            self._copied = loan, copied
        self._settled.set()

    def close(self) -> None:
        """End the part of the local save, in whatever way. Idempotent."""
        with self._lock:
            self._settled.set()
            if self._is_read or not self._is_wanted:
                self.snapshot.close()

    # The persistent save.

    def take(self, timeout_s: float) -> tuple[Loan, dict[ShardId, HostShard]] | None:
        """Return the loan of the slot and the shards in it; None when the snapshot is unread.

        The caller ends the loan. Waits for the local save: SaveFailed when it began to read and
        failed, or takes longer.
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
            copied[0].end()
