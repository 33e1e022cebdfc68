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

from collections.abc import Mapping, Sequence
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
    """One box of a leaf as it was saved, with one value of its bytes.

    Attributes:
      crc32c: of capture time.
      holders: the parts of the tier that have it so, by name; empty in storage. Two entries of one
        box are replicas that differ.
    """

    box: Box
    crc32c: int
    holders: tuple[str, ...] = ()


class HeldDocument(NamedTuple):
    """A host state that is there. ``holders``: as in ``ShardCopies``."""

    held: HeldHostState
    holders: tuple[str, ...] = ()


class StepReader(Protocol):
    """One step of a tier. Its methods block, and raise typed errors; not thread-safe.

    Attributes:
      name: for messages.
      save: its identity; without run for a step of plain Orbax, which this package did not write.
      notes: copies that were passed over, and replicas that differ, in words.
      saved_s: Unix time of its commit; None where the tier does not record it.
      metrics: as given to ``save``; None as well.
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
        """Return disjoint boxes that make up a leaf, and that are cheap to read one by one.

        LocalTierError when parts are not here.
        """
        ...

    def crcs(self, path: str) -> Mapping[Box, int]:
        """Return the CRC32C of capture of those of ``boxes`` that were saved as they are."""
        ...

    def read(self, path: str, box: Box) -> Array:
        """Return a new array of the elements of a box, in the leaf's dtype.

        CorruptData when the bytes are not those of capture, in every copy that is here.
        """
        ...

    def documents(self) -> Sequence[HeldDocument]:
        """Return the host states that are here, also of several opinions of one process."""
        ...

    def document(self, held: HeldHostState) -> bytes:
        """Return one host state, encoded. CorruptData when no sound copy is here."""
        ...

    def host_states(self) -> dict[int, bytes]:
        """Return every process's host state, encoded, by process index; {} where none was saved.

        HostStateError when one is not here; CorruptData when no copy of one is sound.
        """
        ...

    def close(self) -> None:
        """Let go of memory that it keeps."""
        ...


class Tier(Protocol):
    """A place that keeps steps. All methods may block; none is collective. See the module."""

    @property
    def name(self) -> TierName:
        """Return which of the two it is."""
        ...

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        """Return the steps that count here as far as this process knows, oldest first.

        PersistentTierError, CorruptData where the tier cannot say.
        """
        ...

    def open_step(self, step: int) -> StepReader:
        """Return the step; of several saves of it the one that counts, else the newest.

        StepNotFound when it is not here; CorruptData when it is here and cannot be used.
        """
        ...

    def remove(self, step: int, incarnation: str) -> None:
        """Remove every save of ``step`` that this process answers for. Idempotent.

        Of RAM those in its own directory; of storage all, at the process that writes there, and
        none at the others. What has failed is done by the next removal.
        """
        ...


def read_leaf(step: StepReader, path: str) -> Array:
    """Return a whole leaf as one array in memory."""
    spec = step.leaves[path]
    array = np.empty(spec.global_shape, dtype_named(spec.dtype))
    full = whole(spec.global_shape)
    for box in step.boxes(path):
        array[slices(relative(box, full))] = step.read(path, box)
    return array


def leaf_bytes(spec: LeafSpec) -> int:
    """Return the bytes of a whole leaf."""
    return volume(whole(spec.global_shape)) * DTYPE_ITEM_BYTES.get(spec.dtype, 1)


def copy_common(into: Array, into_box: Box, array: Array, box: Box) -> None:
    """Copy the elements that both boxes have from ``array``, which is ``box``."""
    common = intersect(into_box, box)
    if common is not None:
        into[slices(relative(common, into_box))] = array[slices(relative(common, box))]
