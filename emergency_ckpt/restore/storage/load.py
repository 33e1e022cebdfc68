"""One process's part in loading a persistent step into RAM.

It publishes what it reads in its own RAM, like a save of its own; the restore that follows is one
from RAM and peers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from emergency_ckpt.core.shard_layout import lay_out, shard_nbytes
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.ram.manifest import build_contents
from emergency_ckpt.ram.slot_writer import SlotFile
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.protocol import (
    LoadPart,
    LoadPlan,
    StorageRead,
    passed_over,
)
from emergency_ckpt.restore.shards.room import RestoreRoom
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.storage.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import LeafSpec, SaveId, ShardId


class StorageLoad:
    """One process's part of a ``LoadPlan``."""

    def __init__(
        self,
        tier: LocalTier,
        persistent: PersistentTier,
        plan: LoadPlan,
        *,
        me: int,
        leaves: Sequence[LeafSpec],
        deadline_s: float,
        room: RestoreRoom,
    ) -> None:
        self._tier = tier
        self._room = room
        self._persistent = persistent
        self._plan = plan
        self._part = plan.parts.get(me, LoadPart())
        self._me = me
        self._leaves = [
            msgspec.structs.replace(leaf, dtype=plan.numbers.get(leaf.path, leaf.dtype))
            for leaf in leaves
        ]
        self._deadline_s = deadline_s

    def run(self) -> int:
        """Read and publish; returns the bytes of tensors that were read.

        Blocks until the deadline at most: while storage does not answer, it is asked again.
        PersistentTierError, CorruptData; RamdiskFull when others fill the ramdisk meanwhile.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._bring()
            except PersistentTierError as error:
                may_pass = error.unreachable and error.retryable
                if not may_pass or time.monotonic() + pause_s >= self._deadline_s:
                    raise
            time.sleep(pause_s)
            self._room.check()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _bring(self) -> int:
        self._bring_documents()
        # Somebody must publish a manifest, also of a state without any bytes.
        if not self._part.reads and self._me != 0:
            return 0
        return self._bring_tensors(self._part.reads)

    @property
    def _expendable(self) -> set[SaveId]:
        return {self._plan.save, *passed_over(self._plan, self._plan.save.run_id)}

    def _bring_tensors(self, reads: Sequence[StorageRead]) -> int:
        plan, specs = self._plan, {leaf.path: leaf for leaf in self._leaves}
        shards = [read.shard for read in reads]
        layout = lay_out(
            self._leaves, [(shard, shard_nbytes(specs[shard.leaf], shard.box)) for shard in shards]
        )
        offsets = {placed.shard: placed.offset for placed in layout.shards}
        # What is here of the save is not whole, and is read once more.
        with self._room.begin_write(
            plan.save, layout.size_bytes, expendable=self._expendable, sparse=True
        ) as writer:
            with writer.file() as file:
                crcs = self._read(reads, offsets, file)
            ordered = [crcs[placed.shard] for placed in layout.shards]
            self._room.check()
            digest = writer.stage(build_contents(plan.save, self._leaves, layout, ordered))
            writer.publish()
        self._tier.keep_only(plan.save, digest)
        return sum(placed.nbytes for placed in layout.shards)

    def _read(
        self, reads: Sequence[StorageRead], offsets: Mapping[ShardId, int], file: SlotFile
    ) -> dict[ShardId, int]:
        """Read all into the slot's file; return the CRC32C of each shard. CorruptData."""
        found = self._persistent.read_into(
            self._plan.item,
            self._part.arrays,
            [(read.shard, offsets[read.shard]) for read in reads],
            file,
            complete=self._plan.complete,
            deadline_s=self._deadline_s,
        )
        crcs: dict[ShardId, int] = {}
        for read, actual in zip(reads, found, strict=True):
            _check_crc(self._plan, read.shard, read.crc32c, actual)
            crcs[read.shard] = actual
        return crcs

    def _bring_documents(self) -> None:
        save, count = self._plan.save, self._plan.document_count
        for wanted in self._part.documents:
            payload: host_states.Payload = None
            if wanted.digest:
                folder = self._plan.documents
                data = self._persistent.read_document(
                    folder, wanted.owner, count, wanted.digest, self._deadline_s
                )
                document = host_states.decode(data)
                if (document.owner, document.count) != (wanted.owner, count):
                    raise CorruptData(
                        "read", f"host state of process {wanted.owner}", "it is another's"
                    )
                payload = document.payload
            # Encoded anew: the step may have been saved under another run id.
            data = host_states.encode(save, wanted.owner, count, payload)
            self._room.publish_host_state(
                save, wanted.owner, count, data, expendable=self._expendable
            )


def _check_crc(plan: LoadPlan, shard: ShardId, expected: int | None, actual: int) -> None:
    if expected is not None and actual != expected:
        raise CorruptData(
            "read",
            f"{shard.leaf}{shard.box} of step {plan.step} from {plan.item}",
            "its CRC32C is not that of capture time",
            expected=f"{expected:08x}",
            actual=f"{actual:08x}",
        )
