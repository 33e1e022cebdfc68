"""A persistent step into the RAM of all processes: the leader's plan, and one process's part.

Each byte leaves storage once, spread over all processes. What a process reads it publishes in its
own RAM, like a save of its own; the restore that follows is one from RAM and peers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.leaves.leaf_comparison import PYTHON_NUMBERS
from emergency_ckpt.core.restore.plan_types import RestorePlan, TargetSet
from emergency_ckpt.core.restore.storage_read import StoredArray, assign_reads
from emergency_ckpt.core.shard_layout import lay_out, shard_nbytes
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.restore.protocol import (
    DocumentRead,
    LoadPart,
    LoadPlan,
    StorageRead,
    passed_over,
)
from emergency_ckpt.restore.shards.room import begin_restore_write
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.tiers.local.manifest import build_contents
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.tiers.persistent.tier import PersistentTier, StoredStep
from emergency_ckpt.tiers.storage.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardId


def plan_load(
    plan: RestorePlan,
    stored: StoredStep,
    arrays: Mapping[str, StoredArray],
    targets: Mapping[int, TargetSet],
    leaves: Mapping[str, LeafSpec],
    run_id: str,
    *,
    wants_host_state: bool,
) -> LoadPlan:
    """Who brings what of a persistent step into RAM. Deterministic."""
    marker = stored.marker
    digests: Sequence[str] = ("",) * len(targets) if marker is None else marker.digests
    saved: dict[str, list[Box]] = {}
    for shard in stored.crcs:
        saved.setdefault(shard.leaf, []).append(shard.box)
    reads = assign_reads(targets, arrays, saved)
    parts: dict[int, LoadPart] = {}
    for process, shards in reads.items():
        parts[process] = LoadPart(
            reads=tuple(StorageRead(shard, stored.crcs.get(shard)) for shard in shards),
            arrays={leaf: arrays[leaf] for leaf in sorted({shard.leaf for shard in shards})},
            documents=tuple(
                DocumentRead(owner, digests[owner])
                for owner in range(process, len(digests), len(targets))
            )
            if wants_host_state
            else (),
        )
    return LoadPlan(
        step=plan.step,
        save=SaveId(plan.step, stored.incarnation, run_id),
        item=stored.item,
        complete=marker is not None,
        parts=parts,
        numbers=_stored_numbers(stored, arrays, leaves),
        document_count=len(digests) if wants_host_state else 0,
        rejected=plan.rejected,
    )


def _stored_numbers(
    stored: StoredStep, arrays: Mapping[str, StoredArray], wanted: Mapping[str, LeafSpec]
) -> dict[str, str]:
    """By path, the dtypes of the wanted Python numbers; ``match_leaves`` found them right."""
    dtypes = {leaf.array.full_name: leaf.spec.dtype for leaf in stored.leaves.values()}
    found = {path: dtypes[array.full_name] for path, array in arrays.items()}
    if stored.marker is not None:
        found |= {leaf.path: leaf.dtype for leaf in stored.marker.leaves}
    return {p: dtype for p, dtype in found.items() if wanted[p].dtype in PYTHON_NUMBERS}


def loaded_copies(plan: LoadPlan, inventory: Inventory) -> set[Quarantined]:
    """Every quarantine entry that may be of a copy that the plan, carried out, has replaced. Pure.

    Args:
      inventory: as reported after the load.
    """
    replaced: set[tuple[str, str]] = set()
    for holder in inventory.holders:
        part = None if holder.process_index is None else plan.parts.get(holder.process_index)
        if part is None:
            continue
        shards = {read.shard for read in part.reads}
        owners = {document.owner for document in part.documents}
        for tensors in holder.tensors:
            contents = inventory.manifests.get(tensors.digest)
            if tensors.save != plan.save or contents is None:
                continue
            if {contents.shard_id(index) for index in range(len(contents.shards))} == shards:
                replaced.add((holder.holder, tensors.digest))
        replaced.update(
            (holder.holder, state.digest)
            for state in holder.host_states
            if (state.save, state.count) == (plan.save, plan.document_count)
            and state.owner in owners
        )
    return {item for item in inventory.quarantined if (item.holder, item.digest) in replaced}


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
    ) -> None:
        self._tier = tier
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
        PersistentTierError, CorruptData; LocalTierError when the ramdisk cannot take it.
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
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _bring(self) -> int:
        self._bring_documents()
        # Somebody must publish a manifest, also of a state without any bytes.
        if not self._part.reads and self._me != 0:
            return 0
        return self._bring_tensors()

    def _bring_tensors(self) -> int:
        specs = {leaf.path: leaf for leaf in self._leaves}
        shards = [read.shard for read in self._part.reads]
        expected = {read.shard: read.crc32c for read in self._part.reads}
        layout = lay_out(
            self._leaves, [(shard, shard_nbytes(specs[shard.leaf], shard.box)) for shard in shards]
        )
        plan = self._plan
        expendable = {plan.save, *passed_over(plan, plan.save.run_id)}
        # What is here of the save is not whole, and is read once more.
        with begin_restore_write(
            self._tier, plan.save, layout.size_bytes, expendable=expendable
        ) as writer:
            found = self._persistent.read_boxes(
                self._plan.item,
                self._part.arrays,
                [placed.shard for placed in layout.shards],
                complete=self._plan.complete,
                deadline_s=self._deadline_s,
            )
            crcs: list[int] = []
            for placed, (shard, array) in zip(layout.shards, found, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                (crc,) = writer.copy([(flat, placed.offset)])
                _check_crc(self._plan, shard, expected[shard], crc)
                crcs.append(crc)
            digest = writer.stage(build_contents(plan.save, self._leaves, layout, crcs))
            writer.publish()
        self._tier.keep_only(plan.save, digest)
        return sum(placed.nbytes for placed in layout.shards)

    def _bring_documents(self) -> None:
        save, count = self._plan.save, self._plan.document_count
        for wanted in self._part.documents:
            payload: host_states.Payload = None
            if wanted.digest:
                data = self._persistent.read_document(
                    save.step, wanted.owner, count, wanted.digest, self._deadline_s
                )
                document = host_states.decode(data)
                if (document.owner, document.count) != (wanted.owner, count):
                    raise CorruptData(
                        "read", f"host state of process {wanted.owner}", "it is another's"
                    )
                payload = document.payload
            # Encoded anew: the step may have been saved under another run id.
            data = host_states.encode(save, wanted.owner, count, payload)
            self._tier.publish_host_state(save, wanted.owner, count, data)


def _check_crc(plan: LoadPlan, shard: ShardId, expected: int | None, actual: int) -> None:
    if expected is not None and actual != expected:
        raise CorruptData(
            "read",
            f"{shard.leaf}{shard.box} of step {plan.step} from {plan.item}",
            "its CRC32C is not that of capture time",
            expected=f"{expected:08x}",
            actual=f"{actual:08x}",
        )
