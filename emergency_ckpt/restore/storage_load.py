"""Reading a step from storage into the memory of all processes: the leader's plan, and one part.

Each byte is read from storage once, by one of the processes. Each process reads its part into a
slot with room for all that stays in its RAM (``LoadedPart``), or into plain memory where the
ramdisk has no room. The restore that follows is from RAM and peers, and fills the rest of that
memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from emergency_ckpt._native import Mapping as Mapped
from emergency_ckpt.cluster.shard_source import LoadedPart, Scratch
from emergency_ckpt.core.boxes import BoxIndex, intersect, volume
from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.core.placement import RetainedShards
from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.leaves import PYTHON_NUMBERS
from emergency_ckpt.core.restore.plan_types import Rejection, RestorePlan, TargetSet
from emergency_ckpt.core.restore.storage_read import StoredArray, assign_reads
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.ram.manifest import build_contents
from emergency_ckpt.ram.slot_writer import SlotWriter, writes_to
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.storage.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S, read_twice
from emergency_ckpt.storage.tier import PersistentTier, StoredStep
from emergency_ckpt.types import Box, LeafSpec, OrbaxStep, SaveId, ShardId
from emergency_ckpt.work_progress import WorkProgress


class StorageRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box to read from storage, and the CRC32C of its bytes at capture where that is known."""

    shard: ShardId
    crc32c: int | None


class DocumentRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host-state document to read into RAM; an empty ``digest`` stands for no host state."""

    owner: int
    digest: str


class LoadPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The part of one process: reads from storage, and how their leaves are stored.

    Attributes:
      pieces: the boxes, as any process reads them, of the targets that no process reads whole.
    """

    reads: tuple[StorageRead, ...] = ()
    arrays: dict[str, StoredArray] = {}
    documents: tuple[DocumentRead, ...] = ()
    pieces: tuple[ShardId, ...] = ()

    def needs(self, targets: TargetSet) -> list[ShardId]:
        """Return the boxes, as read, that the process needs for its ``targets``."""
        cut: dict[str, list[Box]] = {}
        for piece in self.pieces:
            cut.setdefault(piece.leaf, []).append(piece.box)
        uncut = [
            target
            for target in targets
            if volume(target.box)
            and all(intersect(target.box, box) is None for box in cut.get(target.leaf, ()))
        ]
        return [*uncut, *self.pieces]


class LoadPlan(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Bring a persistent step into RAM. Each byte is read once over the whole job.

    Chunks of at most 64 KiB may be read twice, as gaps (``storage/orbax_reader``).

    Attributes:
      save: the step's identity in RAM.
      item: the directory with the step's arrays.
      complete: storage has every chunk, also those of zeros.
      numbers: the stored dtypes of leaves that are Python numbers in the wanted state.
      document_count: number of processes that have saved host states; 0: no host state is read.
    """

    step: int
    save: SaveId
    item: str
    complete: bool
    parts: dict[ProcessIndex, LoadPart]
    numbers: dict[str, str] = {}
    document_count: int = 0
    rejected: tuple[Rejection, ...] = ()

    def share_of(self, processes: Iterable[int]) -> LoadPlan:
        """Return this plan with only the parts of ``processes``, to be sent to them."""
        parts = {process: self.parts.get(process, LoadPart()) for process in processes}
        return msgspec.structs.replace(self, parts=parts)


def passed_over(save: SaveId, rejected: Iterable[Rejection]) -> set[SaveId]:
    """Return the saves in RAM that a plan of ``save`` passed over, since none is complete."""
    return {
        msgspec.structs.replace(save, step=rejection.step, incarnation=rejection.incarnation)
        for rejection in rejected
        if rejection.incarnation is not None
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
) -> LoadPlan:
    """Return the part of each process in bringing a persistent step into RAM. Deterministic."""
    marker = stored.marker
    digests: Sequence[str] = ("",) * len(targets) if marker is None else marker.digests
    saved: dict[str, list[Box]] = {}
    for shard in stored.crcs:
        saved.setdefault(shard.leaf, []).append(shard.box)
    reads = assign_reads(targets, arrays, saved)
    pieces = _pieces(targets, reads)
    parts: dict[int, LoadPart] = {}
    for process, shards in reads.items():
        owners = range(process, len(digests), len(targets)) if wants_host_state else ()
        parts[process] = LoadPart(
            reads=tuple(StorageRead(shard, stored.crcs.get(shard)) for shard in shards),
            arrays={leaf: arrays[leaf] for leaf in sorted({shard.leaf for shard in shards})},
            documents=tuple(DocumentRead(owner, digests[owner]) for owner in owners),
            pieces=pieces[id(targets[process])],
        )
    # By path, the stored dtypes of wanted Python numbers, which ``match_leaves`` has checked.
    stored_dtypes = {leaf.array.full_name: leaf.spec.dtype for leaf in stored.leaves.values()}
    dtype_by_path = {path: stored_dtypes[array.full_name] for path, array in arrays.items()}
    if marker is not None:
        dtype_by_path |= {leaf.path: leaf.dtype for leaf in marker.leaves}
    numbers = {p: dtype for p, dtype in dtype_by_path.items() if leaves[p].dtype in PYTHON_NUMBERS}
    return LoadPlan(
        step=plan.step,
        save=SaveId(plan.step, stored.incarnation, run_id),
        item=stored.item,
        complete=marker is not None,
        parts=parts,
        numbers=numbers,
        document_count=len(digests) if wants_host_state else 0,
        rejected=plan.rejected,
    )


def _pieces(
    targets: Mapping[int, TargetSet], reads: Mapping[int, Iterable[ShardId]]
) -> dict[int, tuple[ShardId, ...]]:
    """Return the ``pieces`` of each target set, by its identity: equal ones share a tuple."""
    boxes: dict[str, set[Box]] = {}
    for shards in reads.values():
        for shard in shards:
            boxes.setdefault(shard.leaf, set()).add(shard.box)
    indices: dict[str, BoxIndex] = {}
    pieces: dict[int, tuple[ShardId, ...]] = {}
    for target_set in targets.values():
        if id(target_set) in pieces:
            continue
        parts: set[ShardId] = set()
        for shard in target_set:
            leaf, read = shard.leaf, boxes.get(shard.leaf, set())
            if shard.box in read or not volume(shard.box):
                continue
            if leaf not in indices:
                indices[leaf] = BoxIndex(read)
            parts.update(ShardId(leaf, box) for box in indices[leaf].touching(shard.box))
        pieces[id(target_set)] = tuple(sorted(parts))
    return pieces


def loaded_copies(plan: LoadPlan, inventory: Inventory) -> set[Quarantined]:
    """Return the quarantine entries of copies that a finished load by ``plan`` may have replaced.

    Pure. ``inventory``: as reported after the load.
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
            its_shards = {contents.shard_id(index) for index in range(len(contents.shards))}
            if its_shards == shards:
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
        targets: TargetSet,
        retained: RetainedShards | None,
        progress: WorkProgress,
        room: RestoreRoom,
    ) -> None:
        """``targets``, ``retained``: as of ``ShardCollection``."""
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
        self._specs = {leaf.path: leaf for leaf in self._leaves}
        self._expendable = {plan.save, *passed_over(plan.save, plan.rejected)}
        self._targets = targets
        self._retained = retained
        self._progress = progress

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that this process reads."""
        return sum(self._size_bytes(read.shard) for read in self._part.reads)

    def _size_bytes(self, shard: ShardId) -> int:
        return shard_nbytes(self._specs[shard.leaf], shard.box)

    def read(self) -> LoadedPart:
        """Read and return this process's part. Host states are published where there is room.

        While storage does not answer, it is asked again, until nothing moves any more. Reads that
        break off are repeated too, as long as some read gets further before long.
        PersistentTierError, CorruptData; LocalTierError when the system gives no memory.
        """
        clock = self._progress.clock
        pause_s, most_bytes, further_s = FIRST_PAUSE_S, 0, clock.now_s()
        self._progress.begin("load", self.nbytes)
        while True:
            try:
                return self._read_all()
            except PersistentTierError as error:
                if not error.unreachable and self._is_another_directory():
                    raise self._not_seen(error) from error
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

    def _is_another_directory(self) -> bool:
        """Return whether this host sees no step of this number at all, as where a mount is missing.

        Process 0 has seen the step a moment ago. What one host lacks says nothing about the step.
        """
        try:
            return self._persistent.found.find(self._plan.step) is None
        except (PersistentTierError, CorruptData):
            return False

    def _not_seen(self, error: PersistentTierError) -> PersistentTierError:
        target = f"step {self._plan.step} in {self._persistent.directory}"
        problem = f"process 0 sees the step there, and this host does not: {error.problem}"
        hint = "mount the same directory on all hosts"
        failure = PersistentTierError("read", target, problem, hint=hint)
        failure.unreachable = True
        return failure

    def _read_all(self) -> LoadedPart:
        save, count = self._plan.save, self._plan.document_count
        without_room: dict[int, bytes] = {}
        for owner, data in self._documents():
            if not self._room.publish_host_state(
                save, owner, count, data, expendable=self._expendable
            ):
                without_room[owner] = data
        memory, layout = self._memory()
        try:
            offsets = {placed.shard: placed.offset for placed in layout.shards}
            crcs = self._read(offsets, memory.mapping)
            here = tuple(placed for placed in layout.shards if placed.shard in crcs)
            in_order = [crcs[placed.shard] for placed in here]
            part = Layout(here, layout.size_bytes)
            contents = build_contents(save, self._leaves, part, in_order)
        except BaseException:
            if isinstance(memory, SlotWriter):
                memory.abort()
            raise
        # The older copies of the save here are not complete, and were read once more.
        self._tier.protect({copy.save for copy in self._tier.held()[0]} - {save})
        self._tier.drop(save)
        return LoadedPart(contents, memory, layout, without_room)

    def _memory(self) -> tuple[SlotWriter | Scratch, Layout]:
        """Return a slot for the boxes that this process reads or keeps in RAM, else memory.

        Memory has room for all boxes that this process reads or needs.
        """
        reads, needs = {read.shard for read in self._part.reads}, self._part.needs(self._targets)
        stays = [shard for shard in needs if self._retained is None or shard in self._retained]
        if stays or (self._me == 0 and not needs):
            layout = self._lay_out({*reads, *stays})
            writer = self._room.begin_write(self._plan.save, layout, expendable=self._expendable)
            if writer is not None:
                return writer, layout
        layout = self._lay_out({*reads, *needs})
        return Scratch(layout.size_bytes), layout

    def _lay_out(self, shards: Iterable[ShardId]) -> Layout:
        return lay_out(self._leaves, [(shard, self._size_bytes(shard)) for shard in shards])

    def _read(self, offsets: Mapping[ShardId, int], into: Mapped) -> dict[ShardId, int]:
        """Read all shards into mapped memory; return the CRC32C of each. CorruptData."""
        crcs: dict[ShardId, int] = {}

        def read_missing() -> None:
            missing = [read for read in self._part.reads if read.shard not in crcs]
            with writes_to(into) as sink:
                read_crcs = self._persistent.read_into(
                    self._plan.item,
                    self._part.arrays,
                    [(read.shard, offsets[read.shard]) for read in missing],
                    sink,
                    complete=self._plan.complete,
                    progress=self._progress,
                )
            damage: CorruptData | None = None
            for read, actual in zip(missing, read_crcs, strict=True):
                if read.crc32c in (None, actual):
                    crcs[read.shard] = actual
                    continue
                damage = damage or CorruptData(
                    "read",
                    f"{read.shard.leaf}{read.shard.box} of step {self._plan.step}"
                    f" from {self._plan.item}",
                    "its CRC32C is not that of capture time",
                    expected=f"{read.crc32c or 0:08x}",
                    actual=f"{actual:08x}",
                )
            if damage is not None:
                raise damage

        read_twice(read_missing)
        return crcs

    def _documents(self) -> Iterator[tuple[int, bytes]]:
        """Read each document; yield its owner and the bytes for RAM."""
        save, count = self._plan.save, self._plan.document_count
        for request in self._part.documents:
            payload: host_states.Payload = None
            orbax = OrbaxStep()
            if request.digest:
                data = self._persistent.read_document(
                    save.step, request.owner, count, request.digest, self._progress.deadline_s
                )
                self._progress.touch()
                document = host_states.decode(data)
                if (document.owner, document.count) != (request.owner, count):
                    raise CorruptData(
                        "read", f"host state of process {request.owner}", "it is another's"
                    )
                payload, orbax = document.payload, document.orbax
            # Encoded anew: the step may have been saved under another run id.
            yield (
                request.owner,
                host_states.encode(save, request.owner, count, payload, orbax=orbax),
            )
