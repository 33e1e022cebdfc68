"""A step in storage comes into the RAM of all processes: the leader's plan, and one process's part.

Each byte leaves storage once, spread over all processes. Each publishes what it reads in its own
RAM, like a save of its own; the restore that follows is one from RAM and peers.

Where the ramdisk of a process has no room, each process reads all that it needs itself, into plain
memory, and the step is in no RAM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from emergency_ckpt._native import Mapping as Mapped
from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.leaves import PYTHON_NUMBERS
from emergency_ckpt.core.restore.plan_types import Rejection, RestorePlan, TargetSet
from emergency_ckpt.core.restore.storage_read import StoredArray, assign_reads
from emergency_ckpt.core.shard_layout import lay_out, shard_nbytes
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, PersistentTierError, RamdiskFull
from emergency_ckpt.ram.manifest import build_contents
from emergency_ckpt.ram.slot_writer import writes_to
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import HeldShards, Scratch
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.storage.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S, read_twice
from emergency_ckpt.storage.tier import PersistentTier, StoredStep
from emergency_ckpt.types import Box, LeafSpec, OrbaxStep, SaveId, ShardId
from emergency_ckpt.work_progress import WorkProgress

_T = TypeVar("_T")


class StorageRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box to read from storage, and the CRC32C of its bytes at capture where that is known."""

    shard: ShardId
    crc32c: int | None


class DocumentRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host-state document to bring into RAM; without a ``digest`` there is none: it is empty."""

    owner: int
    digest: str


class LoadPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The part of one process: reads from storage into RAM, and how their leaves are stored."""

    reads: tuple[StorageRead, ...] = ()
    arrays: dict[str, StoredArray] = {}
    documents: tuple[DocumentRead, ...] = ()


class LoadPlan(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Bring a persistent step into RAM. Each byte is read once over the whole job.

    With ``no_room`` each process reads what it needs, to its devices, and nothing is kept in RAM.

    Attributes:
      save: identity under which it is published in RAM.
      item: directory with its arrays.
      complete: storage holds every chunk, also those of zeros.
      numbers: the stored dtypes of leaves that are Python numbers in the wanted state.
      document_count: number of processes that the host states are of; 0: none are brought.
      no_room: why the step is not brought into RAM; empty where it is.
      timeline: as in ``RestorePlan``, with ``no_room``.
    """

    step: int
    save: SaveId
    item: str
    complete: bool
    parts: dict[ProcessIndex, LoadPart]
    numbers: dict[str, str] = {}
    document_count: int = 0
    rejected: tuple[Rejection, ...] = ()
    no_room: str = ""
    timeline: Timeline | None = None

    def share_of(self, processes: Iterable[int]) -> LoadPlan:
        """Return this plan with the parts of some processes only, as it is sent to these."""
        parts = {process: self.parts.get(process, LoadPart()) for process in processes}
        return msgspec.structs.replace(self, parts=parts)


def passed_over(save: SaveId, rejected: Iterable[Rejection]) -> set[SaveId]:
    """Return the saves in RAM that a plan of ``save`` passed over: none of them is complete."""
    return {
        msgspec.structs.replace(save, step=each.step, incarnation=each.incarnation)
        for each in rejected
        if each.incarnation is not None
    }


def plan_load(
    plan: RestorePlan,
    stored: StoredStep,
    arrays: Mapping[str, StoredArray],
    targets: Mapping[int, TargetSet],
    leaves: Mapping[str, LeafSpec],
    run_id: str,
    *,
    wants_host_state: bool,
    no_room: str = "",
    timeline: Timeline | None = None,
) -> LoadPlan:
    """Return the part of each process in bringing a persistent step into RAM. Deterministic.

    ``no_room``, ``timeline``: as in ``LoadPlan``.
    """
    marker = stored.marker
    digests: Sequence[str] = ("",) * len(targets) if marker is None else marker.digests
    if no_room and (marker is None or all(marker.empty)):
        wants_host_state = False  # there is nothing to apply
    saved: dict[str, list[Box]] = {}
    for shard in stored.crcs:
        saved.setdefault(shard.leaf, []).append(shard.box)
    reads = _all_reads(targets, arrays, saved) if no_room else assign_reads(targets, arrays, saved)
    parts: dict[int, LoadPart] = {}
    for process, shards in reads.items():
        owners: Iterable[int] = range(process, len(digests), len(targets))
        if no_room and len(digests) != len(targets):
            owners = range(len(digests))  # to be remapped
        parts[process] = LoadPart(
            reads=tuple(StorageRead(shard, stored.crcs.get(shard)) for shard in shards),
            arrays={leaf: arrays[leaf] for leaf in sorted({shard.leaf for shard in shards})},
            documents=tuple(DocumentRead(owner, digests[owner]) for owner in owners)
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
        no_room=no_room,
        timeline=timeline,
    )


def _all_reads(
    targets: Mapping[int, TargetSet],
    arrays: Mapping[str, StoredArray],
    saved: Mapping[str, Sequence[Box]],
) -> dict[int, tuple[ShardId, ...]]:
    """Return the boxes that each process reads to have all that it needs without its peers."""
    by_targets: dict[int, tuple[ShardId, ...]] = {}
    for process, wanted in targets.items():  # equal ones share a tuple
        if id(wanted) not in by_targets:
            by_targets[id(wanted)] = assign_reads({process: wanted}, arrays, saved)[process]
    return {process: by_targets[id(wanted)] for process, wanted in targets.items()}


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
            held = {contents.shard_id(index) for index in range(len(contents.shards))}
            if held == shards:
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
        progress: WorkProgress,
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
        specs = {leaf.path: leaf for leaf in self._leaves}
        shards = [read.shard for read in self._part.reads]
        self._sizes = {shard: shard_nbytes(specs[shard.leaf], shard.box) for shard in shards}
        self._progress = progress

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that this process reads."""
        return sum(self._sizes.values())

    def into_ram(self) -> None:
        """Read and publish.

        Blocks until nothing moves any more: while storage does not answer, it is asked again. An
        answer that breaks off comes again too, but gets further before long.
        PersistentTierError, CorruptData; RamdiskFull when the ramdisk has no room.
        """
        self._until_it_answers(self._publish)

    def into_memory(self) -> tuple[HeldShards, list[host_states.HostStateDocument]]:
        """Read into plain memory; return what was read. Blocks as ``into_ram``.

        PersistentTierError, CorruptData; LocalTierError when the system gives no memory.
        """
        return self._until_it_answers(self._read_into_memory)

    def _until_it_answers(self, work: Callable[[], _T]) -> _T:
        clock = self._progress.clock
        pause_s, most_bytes, further_s = FIRST_PAUSE_S, 0, clock.now_s()
        self._progress.begin("load", self.nbytes)
        while True:
            try:
                return work()
            except PersistentTierError as error:
                done_bytes = self._progress.work.done_bytes
                if done_bytes > most_bytes:
                    most_bytes, further_s = done_bytes, clock.now_s()
                may_pass = error.unreachable and error.retryable
                patience_s = further_s + self._progress.limits.patience_s - clock.now_s()
                if not may_pass or pause_s >= min(patience_s, self._progress.left_s):
                    raise
            time.sleep(pause_s)
            self._progress.again()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _publish(self) -> None:
        save, count = self._plan.save, self._plan.document_count
        for owner, data in self._documents():
            if not self._room.publish_host_state(
                save, owner, count, data, expendable=self._expendable
            ):
                raise self._no_room()
        # Somebody must publish a manifest, also of a state without any bytes.
        if self._part.reads or self._me == 0:
            self._publish_tensors()

    def _publish_tensors(self) -> None:
        plan = self._plan
        layout = lay_out(self._leaves, list(self._sizes.items()))
        offsets = {placed.shard: placed.offset for placed in layout.shards}
        # What is here of the save is not complete, and is read once more.
        writer = self._room.begin_write(plan.save, layout, expendable=self._expendable)
        if writer is None:
            raise self._no_room()
        with writer:
            crcs = self._read(offsets, writer.mapping)
            ordered = [crcs[placed.shard] for placed in layout.shards]
            digest = writer.stage(build_contents(plan.save, self._leaves, layout, ordered))
            writer.publish()
        self._tier.keep_only(plan.save, digest)

    def _read_into_memory(self) -> tuple[HeldShards, list[host_states.HostStateDocument]]:
        layout = lay_out(self._leaves, list(self._sizes.items()))
        scratch, held = Scratch(layout.size_bytes), HeldShards()
        held.know(self._leaves)
        documents = [host_states.decode(data) for _, data in self._documents()]
        self._read({placed.shard: placed.offset for placed in layout.shards}, scratch.mapping)
        for placed in layout.shards:
            held.put(placed.shard, partial(scratch.view, placed.offset, placed.nbytes))
        return held, documents

    @property
    def _expendable(self) -> set[SaveId]:
        return {self._plan.save, *passed_over(self._plan.save, self._plan.rejected)}

    def _no_room(self) -> RamdiskFull:
        return RamdiskFull("load", f"step {self._plan.step}", self._room.lack)

    def _read(self, offsets: Mapping[ShardId, int], into: Mapped) -> dict[ShardId, int]:
        """Read all into mapped memory; return the CRC32C of each shard. CorruptData."""
        crcs: dict[ShardId, int] = {}

        def read_missing() -> None:
            missing = [read for read in self._part.reads if read.shard not in crcs]
            with writes_to(into) as sink:
                found = self._persistent.read_into(
                    self._plan.item,
                    self._part.arrays,
                    [(read.shard, offsets[read.shard]) for read in missing],
                    sink,
                    complete=self._plan.complete,
                    progress=self._progress,
                )
            damaged = list[CorruptData]()
            for read, actual in zip(missing, found, strict=True):
                if read.crc32c in (None, actual):
                    crcs[read.shard] = actual
                else:
                    damaged.append(_crc_error(self._plan, read, actual))
            if damaged:
                raise damaged[0]

        read_twice(read_missing)
        return crcs

    def _documents(self) -> Iterator[tuple[int, bytes]]:
        """Read each document; yield its owner and the bytes for RAM."""
        save, count = self._plan.save, self._plan.document_count
        for wanted in self._part.documents:
            payload: host_states.Payload = None
            orbax = OrbaxStep()
            if wanted.digest:
                data = self._persistent.read_document(
                    save.step, wanted.owner, count, wanted.digest, self._progress.deadline_s
                )
                self._progress.touch()
                document = host_states.decode(data)
                if (document.owner, document.count) != (wanted.owner, count):
                    raise CorruptData(
                        "read", f"host state of process {wanted.owner}", "it is another's"
                    )
                payload, orbax = document.payload, document.orbax
            # Encoded anew: the step may have been saved under another run id.
            yield wanted.owner, host_states.encode(save, wanted.owner, count, payload, orbax=orbax)


def _crc_error(plan: LoadPlan, read: StorageRead, actual: int) -> CorruptData:
    return CorruptData(
        "read",
        f"{read.shard.leaf}{read.shard.box} of step {plan.step} from {plan.item}",
        "its CRC32C is not that of capture time",
        expected=f"{read.crc32c or 0:08x}",
        actual=f"{actual:08x}",
    )
