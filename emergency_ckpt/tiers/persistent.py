"""Persistent tier: one sharded copy in Orbax's own format, and the host states beside it.

``<dir>/<step>/`` is an ordinary Orbax step (item ``default``, StandardSave), written by the
processes of the primary slice only, or of all slices together. ``<dir>/host_state/<step>/`` has
one JSON document for each process, checksums of the boxes, and ``marker.json``, written last. A
step counts when Orbax's commit marker and ours are both there. FORMAT.md specifies the second.

A step without that second directory was written by plain Orbax: it has tensors only.

This module, ``orbax_writing`` and ``stored_arrays`` are all that uses Orbax for storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy.typing as npt
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from emergency_ckpt.core.inventory import PersistentStep
from emergency_ckpt.core.storage_read import StoredArray
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.host_state import document_name
from emergency_ckpt.tiers.orbax_writing import (
    ITEM,
    ArrayWriter,
    Meet,
    bytes_at_once,
    meet_nobody,
    write_step,
)
from emergency_ckpt.tiers.persistent_marker import (
    CHECKSUMS_NAME,
    HOST_STATE,
    MARKER_NAME,
    StepMarker,
    build_marker,
    decode_checksums,
    decode_marker,
    encode_checksums,
)
from emergency_ckpt.tiers.plain_orbax import StepFolders, describe_plain
from emergency_ckpt.tiers.state_tree import StateTree
from emergency_ckpt.tiers.storage_arrays import as_arrays
from emergency_ckpt.tiers.storage_directory import StorageDirectory
from emergency_ckpt.tiers.stored_arrays import BoxReader, StoredLeaf, describe_item, open_by_name
from emergency_ckpt.tiers.transfers import HostShard
from emergency_ckpt.types import LeafSpec, SaveId, ShardId

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_BUFFER_BYTES = 2 << 30
STEPS_LOOKED_AT = 16
"""So many of the newest steps are offered to a restore."""

_HIDDEN = ".orbax-checkpoint-tmp-removed"
_COMMIT_MARKER = "commit_success.txt"
"""By these, in object stores, Orbax knows a finished step and a finished item."""

_T = TypeVar("_T")


class StoredStep(NamedTuple):
    """What is stored under a step.

    Attributes:
      item: directory of the Orbax item with the arrays.
      marker: None for a step that plain Orbax wrote.
      leaves: the arrays by path, as Orbax describes them.
      crcs: CRC32C of capture time of the boxes that were saved.
    """

    item: str
    marker: StepMarker | None
    leaves: dict[str, StoredLeaf]
    crcs: dict[ShardId, int]


class PersistentTier:
    """Reads and writes one directory. All methods block for storage.

    None is collective but ``write_tensors``, over its ``writers``. Each has a deadline: what is
    given as ``deadline_s`` (of ``time.monotonic``), else ``timeout_s`` from the call. Until then
    a call is repeated where that may help. What fails is a PersistentTierError, ``retryable`` when
    storage was only slow or overloaded, or CorruptData.

    Args:
      orbax_item: of a step of plain Orbax, the item with the arrays; None: see ``describe_plain``.
      buffer_bytes: how much of a process's arrays may be on its way to or from storage at once.

    Attributes:
      storage: calls below its directory, with the same deadlines and errors.
    """

    def __init__(
        self,
        directory: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        orbax_item: str | None = None,
    ) -> None:
        self.storage = StorageDirectory(directory, timeout_s)
        self._directory = self.storage.path
        self._buffer_bytes = buffer_bytes
        self._folders = StepFolders(self.storage)
        self._orbax_item = orbax_item

    @property
    def directory(self) -> str:
        """Where the tier lives."""
        return str(self._directory)

    def create(self, deadline_s: float | None = None) -> None:
        """Make the directory; of a bucket, only make sure that it is there."""
        self.storage.create(deadline_s)

    # Which steps there are

    def steps(
        self, deadline_s: float | None = None, *, wanted: int | None = None
    ) -> list[PersistentStep]:
        """The newest steps that a restore may use, oldest first; and ``wanted``, however old.

        Steps with both markers, and those of plain Orbax, which have no host states.
        """
        found: list[PersistentStep] = []
        marked = self._marked_steps(deadline_s)
        for step, is_ours in sorted(marked.items(), reverse=True):
            if len(found) >= STEPS_LOOKED_AT and step != wanted:
                continue
            if not is_ours:
                if self._is_finalized(step, deadline_s):
                    found.append(PersistentStep(step, 0, False))
                continue
            marker = self._marker_or_none(step, deadline_s)
            if marker is not None:
                found.append(PersistentStep(step, len(marker.digests), not all(marker.empty)))
        return sorted(found)

    def whole_steps(self, deadline_s: float | None = None) -> list[int]:
        """All steps with both markers, oldest first. Reads no marker."""

        def has_marker(step: int) -> bool:
            return (self._host_state_dir(step) / MARKER_NAME).exists()

        marked = [step for step, ours in self._marked_steps(deadline_s).items() if ours]
        return sorted(
            step
            for step in marked
            if self.storage.do("list", f"/{step}", lambda step=step: has_marker(step), deadline_s)
        )

    def _marked_steps(self, deadline_s: float | None) -> dict[int, bool]:
        """Steps that have an Orbax directory; whether there is one of ours beside it."""
        steps = self._folders.steps(deadline_s)
        if not steps:
            self.storage.check_bucket(deadline_s)
            return {}
        ours = self.storage.numbers_in(HOST_STATE, deadline_s)
        return {step: step in ours and self._folders.of(step) == str(step) for step in steps}

    def _is_finalized(self, step: int, deadline_s: float | None) -> bool:
        path = self._directory / self._folders.of(step)

        def finalized() -> bool:
            return bool(ocp.utils.is_checkpoint_finalized(path))

        try:
            return self.storage.do("look at", f"/{step}", finalized, deadline_s)
        except PersistentTierError as error:
            if isinstance(error.__cause__, ValueError):  # not a directory of Orbax
                return False
            raise

    def _marker_or_none(self, step: int, deadline_s: float | None) -> StepMarker | None:
        try:
            return self.marker(step, deadline_s)
        except CorruptData as error:
            logging.warning("%s; the step does not count", error)
            return None
        except PersistentTierError as error:
            # Absent means not saved whole. Unreadable does not: then an older step must not be
            # taken for the newest.
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def marker(self, step: int, deadline_s: float | None = None) -> StepMarker:
        """The marker of ``step``; PersistentTierError without one."""
        path = self._host_state_dir(step) / MARKER_NAME
        below = f"/{HOST_STATE}/{step}/{MARKER_NAME}"
        data = self.storage.do("read", below, path.read_bytes, deadline_s)
        return decode_marker(data, step, str(path))

    # Restore

    def describe(self, step: int, deadline_s: float | None = None) -> StoredStep:
        """What is stored under ``step``: metadata only."""
        deadline_s = self.storage.deadline_s(deadline_s)
        is_ours = self._marked_steps(deadline_s).get(step, False)
        marker = self.marker(step, deadline_s) if is_ours else None

        def describe() -> tuple[epath.Path, dict[str, StoredLeaf]]:
            folder = self._directory / self._folders.of(step)
            if marker is None:
                return describe_plain(folder, self._orbax_item)
            item = folder / ITEM
            # Of zero-size arrays Orbax stores nothing.
            stored = [x.path for x in marker.leaves if 0 not in x.global_shape]
            found = open_by_name(item, stored, deadline_s) if stored else None
            return item, describe_item(item) if found is None else found

        item, leaves = self.storage.do("describe", f"/{step}", describe, deadline_s)
        crcs: dict[ShardId, int] = {}
        if marker is not None:
            path = self._host_state_dir(step) / CHECKSUMS_NAME
            below = f"/{HOST_STATE}/{step}/{CHECKSUMS_NAME}"
            data = self.storage.do("read", below, path.read_bytes, deadline_s)
            crcs = decode_checksums(data, marker, str(path))
        return StoredStep(str(item), marker, leaves, crcs)

    def read_boxes(
        self,
        item: str,
        arrays: Mapping[str, StoredArray],
        shards: Sequence[ShardId],
        *,
        complete: bool,
        deadline_s: float,
    ) -> Iterator[tuple[ShardId, npt.NDArray[Any]]]:
        """The boxes in the given order, as numpy arrays; see ``BoxReader``."""
        reader = BoxReader(
            item,
            arrays,
            complete=complete,
            buffer_bytes=self._buffer_bytes,
            deadline_s=deadline_s,
        )
        try:
            yield from reader.read(shards)
        except CorruptData:
            raise
        except Exception as error:  # TensorStore raises ValueError for all that lies below it
            raise self.storage.error("read", item.removeprefix(self.directory), error) from error

    def read_document(
        self, step: int, owner: int, count: int, digest: str, deadline_s: float | None = None
    ) -> bytes:
        """One process's host-state document, checked against the ``digest`` of the marker."""
        name = document_name(owner, count)
        path = self._host_state_dir(step) / name
        below = f"/{HOST_STATE}/{step}/{name}"
        data = self.storage.do("read", below, path.read_bytes, deadline_s)
        actual = hashlib.sha256(data).hexdigest()
        if actual != digest:
            raise CorruptData(
                "read", str(path), "the digest differs", expected=digest, actual=actual
            )
        return data

    # Save

    def write_tensors(
        self,
        save: SaveId,
        tree: StateTree,
        shards: Mapping[ShardId, HostShard],
        writers: Sequence[int],
        meet: Meet = meet_nobody,
    ) -> None:
        """Write the state of ``shards`` as Orbax's step. Collective over ``writers``; blocks.

        A whole step of the same number that an earlier life left is replaced: the run went back
        behind it. ``meet``: where the writers wait for each other.
        """
        deadline_s = self.storage.deadline_s(None)
        state = as_arrays(tree, shards, writers)
        arrays = ArrayWriter(writers)

        def write() -> None:
            try:
                write_step(
                    self._directory,
                    save.step,
                    state,
                    writers,
                    arrays,
                    at_once_bytes=bytes_at_once(self._buffer_bytes, shards),
                    meet=lambda name, others: meet(name, others, deadline_s),
                )
            finally:
                # Late, for nobody. With host states beside it, ``remove_leftovers`` sees it.
                is_late = arrays.is_cancelled and jax.process_index() == writers[0]
                if is_late and save.step not in self.storage.numbers_in(HOST_STATE):
                    self._remove_arrays(save.step)

        try:
            self.storage.do(
                "save", f"/{save.step}", write, deadline_s, repeat=False, changes=save.step
            )
        except PersistentTierError:
            # What was given up must not write into a step that is tried again.
            arrays.cancel()
            raise

    def remove(self, step: int) -> None:
        """Remove ``step``, or what is left of it. After a crash it is whole, or counts nowhere.

        Our marker goes first: from then on no restore takes it. Then plain Orbax is made to
        overlook it, before anything else in it goes. What tells it from a step of plain Orbax goes
        last, so that ``remove_leftovers`` finds the rest.
        """

        def clear() -> None:
            (self._host_state_dir(step) / MARKER_NAME).unlink(missing_ok=True)
            self._remove_arrays(step)
            self.storage.clear_folder(f"{HOST_STATE}/{step}")

        self.storage.do("remove", f"/{step}", clear, changes=step)

    def _remove_arrays(self, step: int) -> None:
        """Make Orbax overlook the step, then remove its folders, also those of unfinished saves."""
        if self.storage.is_object_store:
            for marker in (_COMMIT_MARKER, f"{ITEM}/{_COMMIT_MARKER}"):
                (self._directory / str(step) / marker).unlink(missing_ok=True)
            self.storage.clear_folder(str(step))
            return
        for path in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            self.storage.clear_folder(path.name)
        whole = self._directory / str(step)
        if whole.exists():
            hidden = f"{step}{_HIDDEN}"
            whole.rename(self._directory / hidden)
            self.storage.clear_folder(hidden)

    def remove_leftovers(self) -> tuple[list[int], list[int]]:
        """Remove what saves that did not end have left.

        Returns their steps, and those left alone because a call that was given up is still there.
        Nobody may be saving to the directory. Steps of plain Orbax are never touched.
        """
        removed: list[int] = []
        left: list[int] = []
        for step in sorted(self.storage.numbers_in(HOST_STATE)):
            if self.storage.is_changing(step):
                left.append(step)
                continue
            path = self._host_state_dir(step) / MARKER_NAME
            if not self.storage.do("look at", f"/{step}", path.exists):
                self.remove(step)
                removed.append(step)
        return removed, left

    def write_document(self, step: int, owner: int, count: int, data: bytes) -> None:
        """Write one process's document. It counts only once the marker is there."""
        self.storage.put(f"{HOST_STATE}/{step}/{document_name(owner, count)}", data, step=step)

    def publish(
        self,
        save: SaveId,
        documents: Mapping[int, tuple[str, bool]],
        leaves: Sequence[LeafSpec],
        crcs: Mapping[ShardId, int],
    ) -> None:
        """Write checksums, then the marker: ``documents`` has (digest, empty) of every process's.

        From then on the step counts.
        """
        checksums = encode_checksums(leaves, crcs)
        self.storage.put(f"{HOST_STATE}/{save.step}/{CHECKSUMS_NAME}", checksums, step=save.step)
        self.storage.put(
            f"{HOST_STATE}/{save.step}/{MARKER_NAME}",
            build_marker(save, documents, leaves, checksums),
            step=save.step,
        )

    # Common to all

    def _host_state_dir(self, step: int) -> epath.Path:
        return self._directory / HOST_STATE / str(step)
