"""The bytes of one persistent save, in host memory of this process until storage has them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.save.persistent.scratch_area import Borrowed, ScratchArea
from emergency_ckpt.save.saver_parts import SaverParts
from emergency_ckpt.state.capture import SlotCapture, flat_bytes
from emergency_ckpt.state.lending import Loan
from emergency_ckpt.state.staging import HostShard, Memory, Snapshot
from emergency_ckpt.types import LeafSpec, ShardId


class StorageCapture:
    """The shards that one process writes in one persistent save. For the background thread.

    1. What the local save of the step has in its slot is written from there: the slot is on loan.
       Where the ramdisk has no room for the spare slot that this needs, it is copied first.
    2. What no slot holds is copied into the scratch area at once, through the staging memory. On
       CPU too: XLA copies a donated state that is still read, into new memory, within the step.
    """

    def __init__(
        self,
        parts: SaverParts,
        scratch: ScratchArea,
        step: int,
        specs: Mapping[str, LeafSpec],
        layout: Layout,
        snapshot: Snapshot,
        shards: Sequence[ShardId],
        shared: SlotCapture | None,
    ) -> None:
        """``snapshot``: of ``shards``, those that are not in ``shared``. ``layout``: of all.

        ``scratch``: memory for what no slot holds, the same for all captures of a process.
        """
        self._parts = parts
        self._scratch = scratch
        self._step = step
        self._specs = specs
        self._size_bytes = layout.size_bytes
        self._places = {placed.shard: placed for placed in layout.shards}
        self._snapshot = snapshot
        self._shards = shards
        self._shared = shared
        self._borrowed: Borrowed | None = None
        self._captured: dict[ShardId, HostShard] = {}
        self._loans: list[Loan] = []
        self._error: Exception | None = None

    def read(self) -> None:
        """Read everything into host memory; never raises. At once: training may wait for it."""
        started_s = time.monotonic()
        try:
            source = self._read()
        except Exception as error:  # noqa: BLE001 - raised by ``load``, in a stage of the save
            self._error = error
            return
        self._parts.events.emit(
            "persistent.captured",
            step=self._step,
            size_bytes=sum(each.view.nbytes for each in self._captured.values()),
            source=source,
            seconds=time.monotonic() - started_s,
        )

    def load(self) -> Mapping[ShardId, HostShard]:
        """Return the shards, after ``read``. Raises what reading raised."""
        if self._error is not None:
            raise self._error
        return self._captured

    def close(self, *, is_written: bool = False) -> None:
        """Release everything. Idempotent.

        ``is_written``: nobody reads the memory any more. Otherwise a write that was given up may
        still read it, and it is used again when no view of it is alive.
        """
        self._snapshot.close()
        if self._shared is not None:
            self._shared.release()
        if is_written:
            for loan in self._loans:
                loan.end()
        self._captured, self._loans, self._borrowed, self._error = {}, [], None, None

    def _read(self) -> str:
        sources = [self._take(self._snapshot, self._shards)] if self._shards else []
        if self._shared is not None:
            copied = self._shared.take(self._parts.config.persistent_timeout_s)
            if copied is None:
                sources.append(self._take(self._shared.snapshot, self._shared.shards))
            elif self._parts.tier.keeps_lent_for_storage().lend:
                loan, shards = copied
                self._captured.update(shards)
                self._loans.append(loan)
                sources.append("slot")
            else:
                sources.append(self._copy_out(*copied))
        return " and ".join(dict.fromkeys(sources))

    def _take(self, snapshot: Snapshot, shards: Sequence[ShardId]) -> str:
        for batch in snapshot.batches(self._parts.buffers.copy_batch_bytes):
            self._copy([(shards[position], view) for position, view in batch])
        return "scratch"

    def _copy_out(self, loan: Loan, copied: Mapping[ShardId, HostShard]) -> str:
        self._copy([(shard, each.view) for shard, each in copied.items()])
        for shard, each in copied.items():
            if self._captured[shard].crc32c != each.crc32c:
                raise SaveFailed("copy", f"shard {shard}", "its slot was changed since its capture")
        loan.end()
        return "scratch"

    def _copy(self, batch: Sequence[tuple[ShardId, Memory]]) -> None:
        """Copy shards to their places in the scratch area."""
        if self._borrowed is None:
            self._borrowed = self._scratch.borrow(self._size_bytes)
            self._loans.append(self._borrowed.loan)
        places = self._places
        copies = [(flat_bytes(view), places[shard].offset) for shard, view in batch]
        crcs = self._borrowed.copy(copies)
        for (shard, _), crc in zip(batch, crcs, strict=True):
            memory = self._borrowed.loan.view(places[shard].offset, places[shard].nbytes)
            spec = self._specs[shard.leaf]
            self._captured[shard] = HostShard.of_bytes(memory, spec, shard.box, crc)
