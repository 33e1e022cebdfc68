"""The persistent tier: one sharded copy in Orbax's format, with host states and a marker.

``<dir>/<step>/`` is an ordinary Orbax step, written by the processes of one slice.
``<dir>/host_state/<step>/`` has one JSON document for each process, checksums of the boxes, and
``marker.json``. A step counts from the version of ``<dir>/host_state/log/`` that lists it;
FORMAT.md specifies these files. A step without the folder in ``host_state`` was written by plain
Orbax, and has tensors only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from etils import epath

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import covers, describe, is_empty, shape_of, split, volume, whole
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, MAX_MARKER_BYTES
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, state_size_bytes
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.core.step_names import METRICS, leaves_by_item
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import (
    CorruptData,
    DirectoryInUse,
    LocalTierError,
    PersistentTierError,
    StepNotFound,
)
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.host_state import decode, document_name
from emergency_ckpt.storage.calls import read_twice
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.directory_writer import (
    DirectoryWriter,
    delete_step,
    remove_tensors,
    temporary_folders,
)
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.storage.marker import (
    CHECKSUMS_NAME,
    HOST_STATE,
    ITEM,
    MARKER_NAME,
    StepMarker,
    build_marker,
    decode_checksums,
    encode_checksums,
    stored_leaves,
)
from emergency_ckpt.storage.meetings import WRITTEN, Meet, meet_nobody, new_attempt
from emergency_ckpt.storage.pinned import Pinned
from emergency_ckpt.storage.steps import StoredSteps
from emergency_ckpt.tier import Array, HeldDocument, ShardCopies, StepReader
from emergency_ckpt.types import PERSISTENT, Box, LeafSpec, OrbaxStep, SaveId, ShardId, TierName
from emergency_ckpt.work_progress import WorkProgress

# JAX, Orbax and TensorStore are imported where arrays are described, read or written: a list of
# steps, and a restart from RAM, need none of them.
if TYPE_CHECKING:
    from emergency_ckpt.state.staging import HostShard
    from emergency_ckpt.state.tree import PyTree, StateTree
    from emergency_ckpt.storage.chunks import Sink
    from emergency_ckpt.storage.orbax_reader import BoxReader, StoredLeaf

DEFAULT_TIMEOUT_S = 300.0

PIECE_BYTES = 256 << 20
"""Bytes of a leaf that are read at once, where its boxes are not larger."""

_MOST_DISTURBANCES = 2  # caused by a writer that was replaced: see ``publish``


class StoredStep(NamedTuple):
    """The description of a stored step.

    Attributes:
      item: directory of the Orbax item with the arrays; with several items, that of the step.
      marker: None for a step that plain Orbax wrote.
      leaves: the arrays by path, from Orbax's metadata.
      crcs: CRC32C at capture time of the saved boxes.
    """

    item: str
    marker: StepMarker | None
    leaves: dict[str, StoredLeaf]
    crcs: dict[ShardId, int]
    incarnation: str


class PersistentTier:
    """Reads and writes one directory; see ``Tier``. All methods block for storage.

    Only ``write_tensors`` is collective, over its ``writers``. Each call has a deadline and errors
    as the calls of ``StorageDirectory``; CorruptData is the other error.

    Args:
      orbax_item: the name of the item with the arrays: in the steps that are written (None:
        ``state``), and in steps of plain Orbax (None: see ``describe_plain``).
      buffer_bytes: maximum number of bytes that a process transfers to or from storage at once.
      step_name: as in ``StorageDirectory``.

    Attributes:
      directory: the path or URL.
      storage: calls to the directory.
      found: the steps of the directory.
      writer: of the directory's log, in a process that may ``publish`` and ``remove``; else None.
    """

    name: TierName = PERSISTENT

    def __init__(
        self,
        directory: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        buffer_bytes: int = Buffers.storage_bytes,
        orbax_item: str | None = None,
        step_name: str = "0",
    ) -> None:
        self.storage = StorageDirectory(directory, timeout_s, step_name)
        self.found = StoredSteps(self.storage)
        self._directory = self.storage.path
        self.directory = str(self._directory)
        self._buffer_bytes = buffer_bytes
        self._orbax_item = orbax_item
        self._written: list[str] = []  # its last databases on a file system
        self.writer: DirectoryWriter | None = None

    def with_timeout(self, timeout_s: float) -> PersistentTier:
        """Return the same tier with another timeout for calls without a deadline."""
        tier = PersistentTier(
            self.directory,
            timeout_s=timeout_s,
            buffer_bytes=self._buffer_bytes,
            orbax_item=self._orbax_item,
            step_name=self.storage.step_name,
        )
        tier.found.log.seen = self.found.log.seen
        return tier

    def create(self, deadline_s: float | None = None) -> None:
        """Make the directory; for a bucket, only check that it exists."""
        self.storage.create(deadline_s)

    def load_writer(self) -> None:
        """Import, for seconds, what only the writing of a step needs: Orbax and more. Blocks."""
        importlib.import_module(f"{__package__}.step_writer")

    # As every tier

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        """Return the steps that count by the log and its chain, oldest first.

        A step that the log does not name has no run. ``timeout_s`` bounds the call too.
        """
        longest_s = self.storage.deadline_s(None)
        deadline_s = longest_s if deadline_s is None else min(deadline_s, longest_s)
        view = self.found.view(deadline_s)
        run_id = "" if view.table is None else view.table.run_id
        steps: list[SaveId] = []
        for item in self.found.counting(deadline_s, view):
            entry = view.entry(item.step, item.incarnation)
            is_ours = entry is not None and not entry.is_plain
            steps.append(SaveId(item.step, item.incarnation, run_id if is_ours else ""))
        return steps

    def open_step(self, step: int, deadline_s: float | None = None) -> StoredStepReader:
        """Open the step that counts as ``step``, or the hidden step; StepNotFound, CorruptData."""
        stored_step = self.found.find(step, deadline_s)
        if stored_step is None:
            raise StepNotFound("open", f"step {step}", f"it is not in {self.directory}")
        return self.reader(stored_step)

    def reader(self, stored_step: FoundStep) -> StoredStepReader:
        """Return the reader of a step; CorruptData when the step has a problem."""
        step = stored_step.step
        if step.problem:
            raise CorruptData("find", f"{self.directory}/{step.step}", step.problem)
        return StoredStepReader(self, stored_step)

    def publish(
        self,
        step: StepReader,
        life: str,
        chain: Timeline | None = None,
        progress: WorkProgress | None = None,
    ) -> None:
        """Write a step of another tier as a save of ``life`` does, unless storage has that save.

        Host states are read before any change. Each array is read when the array is written, so a
        state needs no second copy in memory. A former writer that this process has replaced may
        still clear and claim the step's place, once each: a disturbed write is repeated.

        ``progress``: with its clock entered; counts what is read and written, and extends the
        deadline. None: the write has an end when nothing has moved for the time of one call.
        """
        if progress is None:
            progress = WorkProgress(TimeLimits(self.storage.timeout_s, math.inf))
            with progress.clock:
                return self.publish(step, life, chain, progress)
        documents = step.host_states()
        for _ in range(_MOST_DISTURBANCES):
            try:
                return self._publish(step, documents, life, chain, progress)
            except PersistentTierError as error:
                if error.retryable or isinstance(error, DirectoryInUse):
                    raise
                self._own_writer().check()
        return self._publish(step, documents, life, chain, progress)

    def _publish(
        self,
        step: StepReader,
        documents: Mapping[int, bytes],
        life: str,
        chain: Timeline | None,
        progress: WorkProgress,
    ) -> None:
        from emergency_ckpt.storage.item import late_items  # noqa: PLC0415

        save, writer = step.save, self._own_writer()
        orbax = decode(documents[0]).orbax if documents else OrbaxStep()
        self.storage.step_name = orbax.step_name
        writer.begin(life)
        if writer.has(save):
            return
        writer.make_room(save.step, chain)
        for owner, data in documents.items():
            self.write_document(save.step, owner, len(documents), data)
        like = self._newest_items()
        if orbax.items and set(like) != set(orbax.items):
            like = dict.fromkeys(orbax.items)
        states = late_items(step, like, self._structure_of, progress.touch)
        orbax = msgspec.structs.replace(orbax, items=tuple(states))

        def meet(name: str) -> None:
            if name == WRITTEN:
                writer.check()  # a newer life may have cleared the files beside the tensors

        progress.begin("tensors", state_size_bytes(step.leaves.values()))
        self._write_items(save, states, (0,), meet, "", orbax, progress)
        writer.check()
        crcs = {
            ShardId(path, box): crc for path in step.leaves for box, crc in step.crcs(path).items()
        }
        described = {
            owner: (hashlib.sha256(data).hexdigest(), decode(data).empty)
            for owner, data in documents.items()
        }
        leaves = tuple(step.leaves.values())
        metrics = orbax.metrics if isinstance(orbax.metrics, dict) else None
        writer.publish(self.finish(save, described, leaves, crcs, metrics, orbax), chain)
        writer.try_to_settle()

    def _newest_items(self) -> dict[str, epath.Path | None]:
        """Return the items of the newest step of this package, for the structure of the state."""
        view = self.found.view()
        for item in reversed(view.steps):
            (result,) = self.found.inspect_each(view, [item])
            # The structure of a step that cannot be read, as while another program writes it, is
            # unknown.
            if isinstance(result, FoundStep) and result.marker is not None:
                folder = self._directory / result.folder
                return {name: folder / name for name in result.marker.items}
        return {}

    def _structure_of(self, item: epath.Path) -> Any:
        from emergency_ckpt.storage.item import read_structure  # noqa: PLC0415

        below = f"/{item.parent.name}/{item.name}"
        return self.storage.do("describe", below, lambda: read_structure(item))

    def remove(self, step: int, incarnation: str) -> None:
        """Remove ``step`` where this process has the ``writer``; do nothing elsewhere."""
        if self.writer is not None:
            self.writer.remove([step], incarnation)

    def _own_writer(self) -> DirectoryWriter:
        if self.writer is None:
            raise PersistentTierError("publish", self.directory, "this process only reads it")
        return self.writer

    # Restore

    def describe(self, stored_step: FoundStep, deadline_s: float | None = None) -> StoredStep:
        """Return the description of a step from metadata; CorruptData when it has a problem."""
        deadline_s = self.storage.deadline_s(deadline_s)
        marker = stored_step.marker
        item, leaves = self.arrays(stored_step, deadline_s)
        crcs = {} if marker is None else self.read_checksums(marker, deadline_s)
        return StoredStep(item, marker, leaves, crcs, stored_step.step.incarnation)

    def arrays(
        self, stored_step: FoundStep, deadline_s: float | None = None
    ) -> tuple[str, dict[str, StoredLeaf]]:
        """Return the folder of a step's item, and its arrays by path, as ``describe`` does."""
        from emergency_ckpt.storage import orbax_reader  # noqa: PLC0415

        deadline_s = self.storage.deadline_s(deadline_s)
        marker = stored_step.marker
        if problem := stored_step.step.problem:
            raise CorruptData("describe", f"{self.directory}/{stored_step.folder}", problem)

        def describe() -> tuple[epath.Path, dict[str, StoredLeaf]]:
            folder = self._directory / stored_step.folder
            if marker is None:
                return orbax_reader.describe_plain(folder, self._orbax_item)
            by_item = leaves_by_item(marker.items, stored_leaves(marker))

            def describe_one(name: str) -> dict[str, StoredLeaf]:
                item, paths = folder / name, by_item[name]
                opened = orbax_reader.open_by_name(item, paths, deadline_s) if paths else None
                return orbax_reader.describe_item(item) if opened is None else opened

            return orbax_reader.describe_items(folder, marker.items, describe_one)

        item, leaves = read_twice(
            lambda: self.storage.do("describe", f"/{stored_step.folder}", describe, deadline_s)
        )
        return str(item), leaves

    def find(self, step: int) -> FoundStep:
        """Return the step as ``open_step`` does; PersistentTierError when there is no such step."""
        stored_step = self.found.find(step)
        target = f"{self.directory}/{step}"
        if stored_step is None:
            raise PersistentTierError("find", target, "there is no such step")
        if stored_step.step.problem:
            raise CorruptData("find", target, stored_step.step.problem)
        return stored_step

    def read_boxes(
        self,
        item: str,
        arrays: Mapping[str, StoredArray],
        shards: Sequence[ShardId],
        *,
        complete: bool,
        deadline_s: float,
    ) -> Iterator[tuple[ShardId, npt.NDArray[Any]]]:
        """Yield the boxes in the given order, as numpy arrays; see ``BoxReader``."""
        progress = WorkProgress.until(deadline_s)
        with self._reading(item, arrays, complete=complete, progress=progress) as reader:
            yield from reader.read(shards)

    def read_into(
        self,
        item: str,
        arrays: Mapping[str, StoredArray],
        boxes: Sequence[tuple[ShardId, int]],
        sink: Sink,
        *,
        complete: bool,
        progress: WorkProgress,
    ) -> list[int]:
        """Read each box in C order to its offset in ``sink``; return the CRC32C of the bytes.

        ``complete``, ``progress``: as in ``BoxReader``. Errors of ``sink`` pass through.
        """
        with self._reading(item, arrays, complete=complete, progress=progress) as reader:
            return reader.read_into(sink, boxes)

    @contextlib.contextmanager
    def _reading(
        self, item: str, arrays: Mapping[str, StoredArray], **how: Any
    ) -> Generator[BoxReader]:
        """Yield a reader of ``item``; give errors of storage their types."""
        from emergency_ckpt.storage import orbax_reader  # noqa: PLC0415

        try:
            yield orbax_reader.BoxReader(item, arrays, buffer_bytes=self._buffer_bytes, **how)
        except (CorruptData, LocalTierError):
            raise
        except Exception as error:  # TensorStore raises ValueError for every storage error
            raise self.storage.error("read", item.removeprefix(self.directory), error) from error

    def read_document(
        self, step: int, owner: int, count: int, digest: str, deadline_s: float | None = None
    ) -> bytes:
        """Return a process's host-state document, checked against the marker's ``digest``."""
        below = f"{HOST_STATE}/{step}/{document_name(owner, count)}"
        path = self._directory / below

        def read() -> bytes:
            data = self.storage.read_bounded(path, f"/{below}", MAX_HOST_STATE_BYTES, deadline_s)
            actual = hashlib.sha256(data).hexdigest()
            if actual != digest:
                problem = "the digest differs"
                raise CorruptData("read", str(path), problem, expected=digest, actual=actual)
            return data

        return read_twice(read)

    def read_checksums(
        self, marker: StepMarker, deadline_s: float | None = None
    ) -> dict[ShardId, int]:
        """Return the CRC32C of each box at capture time, checked against ``marker``."""
        below = f"{HOST_STATE}/{marker.save.step}/{CHECKSUMS_NAME}"
        path = self._directory / below

        def read() -> dict[ShardId, int]:
            data = self.storage.read_bounded(path, f"/{below}", MAX_MARKER_BYTES, deadline_s)
            return decode_checksums(data, marker, str(path))

        return read_twice(read)

    # Save

    def write_tensors(
        self,
        save: SaveId,
        tree: StateTree,
        shards: Mapping[ShardId, HostShard],
        writers: Sequence[int],
        meet: Meet = meet_nobody,
        attempt: str = "",
        orbax: OrbaxStep = OrbaxStep(),  # noqa: B008 - immutable
        progress: WorkProgress | None = None,
        holders: Sequence[int] | None = None,
    ) -> None:
        """Write the state of ``shards`` as Orbax's step. Collective over ``writers``; blocks.

        The step's place must be empty: see ``DirectoryWriter.make_room``.
        ``holders``: the writers that have shards; None: all writers.
        ``attempt``: as ``new_attempt`` returns it; several writers must agree on one name.
        ``progress``: counts written bytes, and extends the deadline; None: the deadline of a call.
        """
        from emergency_ckpt.storage.item import item_state  # noqa: PLC0415

        state = item_state(tree, shards, holders or writers)
        items = self._items_of(orbax)
        states = {items[0]: state} if len(items) == 1 else {name: state[name] for name in items}
        self._write_items(save, states, writers, meet, attempt, orbax, progress)

    def _write_items(
        self,
        save: SaveId,
        states: Mapping[str, PyTree],
        writers: Sequence[int],
        meet: Meet,
        attempt: str,
        orbax: OrbaxStep,
        progress: WorkProgress | None = None,
    ) -> None:
        """Write items as Orbax's step; ``states`` as of ``StepWriter``, the rest as above."""
        import jax  # noqa: PLC0415

        from emergency_ckpt.storage.array_writes import (  # noqa: PLC0415
            ArrayWrites,
            release_pages,
        )
        from emergency_ckpt.storage.step_writer import StepWriter  # noqa: PLC0415

        me = jax.process_index()
        progress = progress or WorkProgress.until(self.storage.deadline_s(None))
        name = self.storage.name_of(save.step)
        folder = self._directory / name
        writes = ArrayWrites(
            attempt=attempt or new_attempt(),
            creates=me == writers[0],
            at_once_bytes=self._buffer_bytes,
            progress=progress,
        )

        def write() -> None:
            if not self.storage.is_object_store:
                for written in self._written:
                    release_pages(written)
                database = writes.database_of(me)
                self._written = [f"{folder}/{item}/{database}" for item in states]
            try:
                StepWriter(folder, save, states, writers, writes, orbax=orbax, meet=meet).write()
                self.storage.forget_listings()
            finally:
                if writes.is_cancelled and me == writers[0]:
                    has_metrics = orbax.metrics is not None
                    self._withdraw(save.step, [*states, *([METRICS] if has_metrics else ())])

        try:
            self.storage.do("save", f"/{name}", write, progress=progress, changes=save.step)
        except PersistentTierError:
            # A cancelled write must not reach a step that is saved again.
            writes.cancel()
            raise

    def _items_of(self, orbax: OrbaxStep) -> tuple[str, ...]:
        return (self._orbax_item or ITEM,) if orbax.items is None else orbax.items

    def _withdraw(self, step: int, items: Iterable[str]) -> None:
        """Remove tensors that were written after the cancellation of their save. Inside ``do``.

        ``items``: of that save. Tensors beside host states stay, because ``DirectoryWriter`` finds
        them by the host states.
        """
        storage, name = self.storage, self.storage.name_of(step)
        # Listed first: a later save of the step wrote its host states before its tensors.
        if storage.is_object_store:
            objects = storage.objects_with(f"{name}/")
            objects = self.found.inspection().of_a_save(objects, items)
            if step not in storage.numbers_in(HOST_STATE):
                delete_step(storage, objects)
            return
        own = [name] if self.found.inspection().is_of_a_save(name) else []
        pinned = Pinned(storage.path, [*own, *temporary_folders(storage, name)])
        if step not in storage.numbers_in(HOST_STATE):
            remove_tensors(pinned, name)

    def write_document(self, step: int, owner: int, count: int, data: bytes) -> None:
        """Write a process's document, which counts once the marker is written.

        PersistentTierError when another save has written the step meanwhile.
        """
        self._put_new(step, document_name(owner, count), data)

    def _put_new(self, step: int, name: str, data: bytes) -> None:
        # A life that hung and goes on must not replace the files of the next life.
        below = f"{HOST_STATE}/{step}/{name}"
        work = functools.partial(self.storage.put_new, below, data)
        self.storage.do("write", f"/{below}", work, changes=step)

    def finish(
        self,
        save: SaveId,
        documents: Mapping[int, tuple[str, bool]],
        leaves: Sequence[LeafSpec],
        crcs: Mapping[ShardId, int],
        metrics: Mapping[str, Any] | None = None,
        orbax: OrbaxStep = OrbaxStep(),  # noqa: B008 - immutable
    ) -> Entry:
        """Write the checksums, then the marker; return the entry that makes the step count.

        ``documents``: (SHA-256 in hex, is empty) of every process's host state, by process index.
        PersistentTierError when another save has written the step meanwhile.
        """
        items = self._items_of(orbax)
        tensors = self.found.inspection().tensors_id(save, items)
        checksums = encode_checksums(leaves, crcs)
        self._put_new(save.step, CHECKSUMS_NAME, checksums)
        marker = build_marker(save, documents, leaves, checksums, tensors, items)
        self._put_new(save.step, MARKER_NAME, marker)
        name = self.storage.name_of(save.step)
        return Entry(
            step=save.step,
            incarnation=save.incarnation,
            marker=hashlib.sha256(marker).hexdigest(),
            processes=len(documents),
            stateful=not all(is_empty for _, is_empty in documents.values()),
            size_bytes=state_size_bytes(leaves),
            saved_s=time.time(),
            folder="" if name == str(save.step) else name,
            metrics=None if metrics is None else dict(metrics),
        )


class StoredStepReader:
    """A step in storage; see ``StepReader``. Boxes with a known CRC32C are compared with it.

    Attributes:
      found: the step that is read, which has no problem.
    """

    def __init__(self, tier: PersistentTier, stored_step: FoundStep) -> None:
        marker, step = stored_step.marker, stored_step.step
        self.name = f"step {step.step} in {tier.directory}"
        self.save = marker.save if marker else SaveId(step.step, step.incarnation, "")
        self.notes: list[str] = []
        self.found = stored_step
        self.saved_s = stored_step.committed_ns / 1e9 if stored_step.committed_ns else None
        entry = stored_step.entry
        self.metrics: Mapping[str, Any] | None = None if entry is None else entry.metrics
        self._tier = tier
        self._arrays: tuple[str, Mapping[str, StoredLeaf]] | None = None

    def arrays(self) -> tuple[str, Mapping[str, StoredLeaf]]:
        """Return the folder of its item and the arrays there, by path. Loads JAX and Orbax."""
        if self._arrays is None:
            self._arrays = self._tier.arrays(self.found)
        return self._arrays

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Return every leaf, by path: as saved, or for a step of plain Orbax as Orbax has them."""
        return self._leaves

    @functools.cached_property
    def _leaves(self) -> Mapping[str, LeafSpec]:
        marker = self.found.marker
        if marker is not None:
            return {leaf.path: leaf for leaf in marker.leaves}
        return {path: leaf.spec for path, leaf in sorted(self.arrays()[1].items())}

    @functools.cached_property
    def _crcs(self) -> Mapping[str, Mapping[Box, int]]:
        marker = self.found.marker
        if marker is None:
            return {}
        crcs: dict[str, dict[Box, int]] = {}
        for shard, crc in sorted(self._tier.read_checksums(marker).items()):
            crcs.setdefault(shard.leaf, {})[shard.box] = crc
        return crcs

    def copies(self, path: str) -> list[ShardCopies]:
        """Return the saved boxes of a leaf."""
        return [ShardCopies(box, crc) for box, crc in self.crcs(path).items()]

    def boxes(self, path: str) -> list[Box]:
        """Return a leaf's saved boxes, which have CRC32Cs, if they are all of it; else chunks."""
        spec = self.leaves[path]
        full = whole(spec.global_shape)
        if is_empty(full):
            return []
        saved = sorted(self.crcs(path))
        if saved and covers(full, saved) and sum(map(volume, saved)) == volume(full):
            return saved
        chunk = self.arrays()[1][path].array.chunk_shape
        return split(full, chunk, DTYPE_ITEM_BYTES.get(spec.dtype, 8), PIECE_BYTES)

    def crcs(self, path: str) -> Mapping[Box, int]:
        """Return the CRC32C at capture of each saved box."""
        return self._crcs.get(path, {})

    def read(self, path: str, box: Box) -> Array:
        """Return the elements of a box. PersistentTierError, CorruptData."""
        dtype = dtype_named(self.leaves[path].dtype)
        if is_empty(box):
            return np.empty(shape_of(box), dtype)

        def read() -> Array:
            ((_, array),) = self.read_all([ShardId(path, box)])
            return self._checked(path, box, np.ascontiguousarray(array))

        return read_twice(read).view(dtype).reshape(shape_of(box))

    def read_all(self, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Array]]:
        """Yield the boxes in the given order, as stored; CRC32Cs are not compared.

        The tier's timeout is for all boxes together. PersistentTierError, CorruptData.
        """
        item, leaves = self.arrays()
        return self._tier.read_boxes(
            item,
            {path: leaf.array for path, leaf in leaves.items()},
            shards,
            complete=self.found.marker is not None,
            deadline_s=self._tier.storage.deadline_s(None),
        )

    def _checked(self, path: str, box: Box, data: Array) -> Array:
        spec, crc = self.leaves[path], self.crcs(path).get(box)
        if data.dtype.itemsize != dtype_named(spec.dtype).itemsize:
            target, problem = f"{self.name}, leaf {path!r}", "its dtype is another"
            raise CorruptData("read", target, problem, expected=spec.dtype, actual=data.dtype.name)
        if crc is not None:
            actual = _native.crc32c(data.reshape(-1).view(np.uint8).data)
            if actual != crc:
                target = f"{self.name}, {path}{describe(box)}"
                problem = "the CRC32C differs from that of capture"
                raise CorruptData("read", target, problem, expected=crc, actual=actual)
        return data

    def documents(self) -> list[HeldDocument]:
        """Return the host states that the step's marker names; none for a step of plain Orbax.

        Their digests are of the documents; the sizes are not known before the documents are read.
        """
        marker = self.found.marker
        if marker is None:
            return []
        count = len(marker.digests)
        return [
            HeldDocument(HeldHostState(self.save, owner, count, digest, 0, marker.empty[owner]))
            for owner, digest in enumerate(marker.digests)
        ]

    def document(self, held: HeldHostState) -> bytes:
        """Return a document, compared with its digest. CorruptData, PersistentTierError."""
        return self._tier.read_document(self.save.step, held.owner, held.count, held.digest)

    def host_states(self) -> dict[int, bytes]:
        """Return all documents. CorruptData, PersistentTierError."""
        return {host_state.owner: self.document(host_state) for host_state, _ in self.documents()}

    def close(self) -> None:
        """Do nothing: each read opens the arrays that it needs."""
