"""A tier: a place that keeps steps of a run. ``ram`` and ``storage`` implement it.

``Tier`` is what a list, a description, an export and a removal need of either, and ``StepReader``
is a step that one of them has. Where the two differ:

| | RAM (``LOCAL``) | storage (``PERSISTENT``) |
|---|---|---|
| it holds | of a step the shards of one process, some host states | complete steps |
| a step counts | once the vote of all processes said so | from the log's version that lists it |
| who writes it | every process its own part | a set of writers; the first commits |
| room | slots of a fixed number; the least needed makes way | no bound; retention removes |
| a list costs | nothing: it is in memory | the log and a listing: a second in a bucket |
| a read costs | a copy of memory | requests, each with a deadline and retries |
| it survives | the end of every process on the host | the loss of all hosts |

What one alone can do is not here: RAM gives its memory to be read (``LocalTier.reading``);
storage is read in ranges (``PersistentTier.read_into``). Nor is writing, which has no part in
common: a slot is written while the bytes arrive (``SlotWriter``), and counts by a vote; storage is
written by several processes in stages (``PersistentTier.write_tensors``), and after the job's end
by one alone (``PersistentTier.publish``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import intersect, relative, slices, volume, whole
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.types import Box, LeafSpec, SaveId, TierName

Array = npt.NDArray[Any]


class ShardCopies(NamedTuple):
    """One box of a leaf as it was saved, with the CRC32C of capture.

    Two entries of one box are replicas that differ. ``holders``: the names of the parts of the tier
    that have these bytes; empty in storage.
    """

    box: Box
    crc32c: int
    holders: tuple[str, ...] = ()


class HeldDocument(NamedTuple):
    """A host state that the tier has. ``holders``: as in ``ShardCopies``."""

    held: HeldHostState
    holders: tuple[str, ...] = ()


class StepReader(Protocol):
    """One step of a tier. The methods block, and raise typed errors; not thread-safe.

    Attributes:
      name: for messages.
      save: the identity of the step; without a run for a step of plain Orbax.
      notes: copies that were passed over, and replicas that differ, in words.
      saved_s: Unix time of the commit; None where the tier has no record.
      metrics: as given to ``save``; None where the tier has no record.
    """

    name: str
    save: SaveId
    notes: list[str]
    saved_s: float | None
    metrics: Mapping[str, Any] | None

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Return every leaf, by path."""
        ...

    def copies(self, path: str) -> Sequence[ShardCopies]:
        """Return what was saved of a leaf, by box; nothing where no CRC32C was recorded."""
        ...

    def boxes(self, path: str) -> Sequence[Box]:
        """Return disjoint boxes that make up a leaf, cheap to read; LocalTierError for gaps."""
        ...

    def crcs(self, path: str) -> Mapping[Box, int]:
        """Return the CRC32C of capture of those of ``boxes`` that were saved as they are."""
        ...

    def read(self, path: str, box: Box) -> Array:
        """Return a new array of the elements of a box, in the leaf's dtype.

        CorruptData when no copy in the tier has the bytes of capture.
        """
        ...

    def documents(self) -> Sequence[HeldDocument]:
        """Return the host states in the tier, where copies of one process's state may differ."""
        ...

    def document(self, held: HeldHostState) -> bytes:
        """Return one host state, encoded. CorruptData when the tier has no sound copy."""
        ...

    def host_states(self) -> dict[int, bytes]:
        """Return every process's host state, encoded, by process index; {} where none was saved.

        HostStateError when a host state is missing; CorruptData when no copy of one is sound.
        """
        ...

    def close(self) -> None:
        """Release the memory of the reader."""
        ...


class Tier(Protocol):
    """A place that keeps steps. All methods may block; none is collective. See the module."""

    @property
    def name(self) -> TierName:
        """Return which of the two it is."""
        ...

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        """Return the steps that count as far as this process knows, oldest first.

        PersistentTierError, CorruptData where the tier cannot say.
        """
        ...

    def open_step(self, step: int, deadline_s: float | None = None) -> StepReader:
        """Return the step; of several saves the save that counts, else the newest.

        StepNotFound when there is no such step; CorruptData when the step cannot be used;
        PersistentTierError where the tier cannot say.
        """
        ...

    def remove(self, step: int, incarnation: str) -> None:
        """Remove every save of ``step`` that this process answers for. Idempotent.

        In RAM these are the saves in the process's own directory. In storage these are all saves at
        the process that writes there, and none elsewhere. A failed removal is repeated by the next.
        """
        ...


def read_leaf(step: StepReader, path: str, on_box: Callable[[], object] = lambda: None) -> Array:
    """Return a whole leaf as one array in memory; call ``on_box`` after each box of it."""
    spec = step.leaves[path]
    array = np.empty(spec.global_shape, dtype_named(spec.dtype))
    full = whole(spec.global_shape)
    for box in step.boxes(path):
        array[slices(relative(box, full))] = step.read(path, box)
        on_box()
    return array


def leaf_bytes(spec: LeafSpec) -> int:
    """Return the bytes of a whole leaf."""
    return volume(whole(spec.global_shape)) * DTYPE_ITEM_BYTES.get(spec.dtype, 1)


def copy_common(into: Array, into_box: Box, array: Array, box: Box) -> None:
    """Copy the elements that both boxes have from ``array``, which is ``box``."""
    common = intersect(into_box, box)
    if common is not None:
        into[slices(relative(common, into_box))] = array[slices(relative(common, box))]
