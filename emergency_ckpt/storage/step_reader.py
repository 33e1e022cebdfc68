"""A step that Orbax wrote, in a persistent directory or any folder, read through TensorStore.

Neither JAX nor Orbax is imported before an array is read, or a step of plain Orbax described.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import covers, describe, is_empty, shape_of, split, volume, whole
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.storage.calls import read_twice
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.tier import Array, HeldDocument, ShardCopies
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardId

if TYPE_CHECKING:
    from emergency_ckpt.storage.orbax_reader import StoredLeaf
    from emergency_ckpt.storage.tier import PersistentTier

PIECE_BYTES = 256 << 20
"""Bytes of a leaf that are read at once, where its boxes are not larger."""


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
