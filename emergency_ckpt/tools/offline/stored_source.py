"""A step that Orbax wrote: of a persistent directory, or any folder. Read through TensorStore."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import numpy as np
from etils import epath

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import covers, describe, is_empty, shape_of, volume, whole
from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.errors import CheckpointError, CorruptData, PersistentTierError
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.storage.orbax_reader import BoxReader
from emergency_ckpt.storage.plain_orbax import describe_plain
from emergency_ckpt.storage.tier import PersistentTier, StoredStep
from emergency_ckpt.tools.offline.step_source import Array, split
from emergency_ckpt.types import Box, LeafSpec, ShardId

_BUFFER_BYTES = 1 << 30


class StoredSource:
    """The arrays of a stored step. Boxes of which a CRC32C is known are compared with it.

    Args:
      step: its number; of a folder the one in its name, else 0.
      timeout_s: maximum time in seconds of one read.
    """

    def __init__(self, stored: StoredStep, name: str, step: int, timeout_s: float) -> None:
        self.name = name
        self.step = step
        self.stored = stored
        self._timeout_s = timeout_s
        marker = stored.marker
        recorded = {leaf.path: leaf for leaf in marker.leaves} if marker else {}
        self._leaves = recorded or {path: leaf.spec for path, leaf in stored.leaves.items()}
        self._crcs: dict[str, dict[Box, int]] = {}
        for shard, crc in stored.crcs.items():
            self._crcs.setdefault(shard.leaf, {})[shard.box] = crc

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Return every leaf, by path: of this package's steps as saved, else as Orbax has them."""
        return self._leaves

    def boxes(self, path: str) -> list[Box]:
        """Return the saved boxes, which have CRC32Cs, where they make up the leaf; else chunks."""
        spec = self._leaves[path]
        full = whole(spec.global_shape)
        if is_empty(full):
            return []
        saved = sorted(self._crcs.get(path, ()))
        if saved and covers(full, saved) and sum(map(volume, saved)) == volume(full):
            return saved
        chunk = self.stored.leaves[path].array.chunk_shape
        return list(split(full, chunk, DTYPE_ITEM_BYTES.get(spec.dtype, 8)))

    def read(self, path: str, box: Box) -> Array:
        """Return the elements of a box. PersistentTierError, CorruptData."""
        spec = self._leaves[path]
        dtype = dtype_named(spec.dtype)
        if is_empty(box):
            return np.empty(shape_of(box), dtype)
        try:
            found = self._read(path, box)
        except CheckpointError:
            raise
        except Exception as error:  # TensorStore raises ValueError for every storage error
            problem = f"{type(error).__name__}: {str(error)[:500]}"
            raise PersistentTierError("read", f"{self.name}, leaf {path!r}", problem) from error
        if found.dtype.itemsize != dtype.itemsize:
            raise CorruptData(
                "read",
                f"{self.name}, leaf {path!r}",
                "its dtype is another",
                expected=spec.dtype,
                actual=found.dtype.name,
            )
        crc = self._crcs.get(path, {}).get(box)
        data = np.ascontiguousarray(found)
        if (
            crc is not None
            and (actual := _native.crc32c(data.reshape(-1).view(np.uint8).data)) != crc
        ):
            raise CorruptData(
                "read",
                f"{self.name}, {path}{describe(box)}",
                "the CRC32C differs from that of capture",
                expected=crc,
                actual=actual,
            )
        return data.view(dtype).reshape(shape_of(box))

    def moved(self, item: str) -> StoredSource:
        """Return the same step in a copy of its item."""
        return StoredSource(
            self.stored._replace(item=item), f"the copy in {item}", self.step, self._timeout_s
        )

    def close(self) -> None:
        """Do nothing: each read opens the arrays that it needs."""

    def _read(self, path: str, box: Box) -> Array:
        reader = BoxReader(
            self.stored.item,
            {path: self.stored.leaves[path].array},
            complete=self.stored.marker is not None,
            buffer_bytes=_BUFFER_BYTES,
            deadline_s=time.monotonic() + self._timeout_s,
        )
        ((_, array),) = reader.read([ShardId(path, box)])
        return array


def open_stored(directory: str, step: int, signing: StepSigning, timeout_s: float) -> StoredSource:
    """Open a step of a persistent directory. PersistentTierError, CorruptData."""
    tier = PersistentTier(directory, timeout_s=timeout_s, signing=signing)
    stored = tier.describe(tier.find(step))
    return StoredSource(stored, f"step {step} in {directory}", step, timeout_s)


def open_folder(folder: str, timeout_s: float) -> StoredSource:
    """Open a folder into which Orbax wrote a step or an item. PersistentTierError."""
    try:
        item, leaves = describe_plain(epath.Path(folder), None)
    except Exception as error:  # Orbax and the clients pass on errors of any type
        problem = f"{type(error).__name__}: {str(error)[:500]}"
        hint = "give a step's folder, or the one of its item"
        raise PersistentTierError("open", folder, problem, hint=hint) from error
    stored = StoredStep(str(item), None, leaves, {}, "")
    digits = re.search(r"[0-9]{1,18}$", folder.rstrip("/"))
    return StoredSource(stored, folder, int(digits[0]) if digits else 0, timeout_s)
