"""A step on ramdisks: the shards of all process directories that were named, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import Portion, describe, divide, intersect, shape_of, whole
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.majority import settle
from emergency_ckpt.errors import CorruptData, LocalTierError, TransferError
from emergency_ckpt.ram.process_files import ProcessFiles, file_name
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.tools.offline.step_source import Array, copy_common
from emergency_ckpt.tools.survey.ramdisk import RamCopy
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardEntry

Copy = tuple[RamCopy, ShardEntry]


class OtherHosts(Protocol):
    """The RAM of other hosts, in process directories named by their addresses."""

    def has(self, folder: Path) -> bool:
        """Return whether ``folder`` is one of theirs, and not a directory here."""
        ...

    def shard(self, copy: RamCopy, entry: ShardEntry) -> Array:
        """Return the bytes of a shard, valid until the next call. TransferError."""
        ...

    def document(self, folder: Path, save: SaveId, owner: int, count: int) -> bytes:
        """Return the encoded host state of process ``owner`` of ``count``. TransferError."""
        ...


class RamSource:
    """A save on ramdisks. Not thread-safe. CRC32Cs are compared at every read.

    Args:
      inventory: of its run; the majority of its holders decides between copies that differ.
      owner_uid: the user whose ramdisks they are; None: the effective user.
      others: fetches the copies that are not on ramdisks here.

    Attributes:
      notes: copies that were passed over, and replicas that differ, in words.
    """

    def __init__(
        self,
        save: SaveId,
        copies: Sequence[RamCopy],
        inventory: Inventory,
        owner_uid: int | None = None,
        others: OtherHosts | None = None,
    ) -> None:
        self.save = save
        self._others = others
        self.name = f"step {save.step} in RAM"
        self._owner_uid = owner_uid
        self._leaves = {leaf.path: leaf for leaf in copies[0].published.contents.leaves}
        majority_result = settle(inventory, save)
        self.notes = [
            each.describe() for each in (*majority_result.decided, *majority_result.undecided)
        ]
        outvoted = {(bad.holder, bad.digest, bad.shard) for bad in majority_result.outvoted}
        self._copies: dict[str, dict[Box, list[Copy]]] = {path: {} for path in self._leaves}
        for copy in copies:
            contents = copy.published.contents
            for index, entry in enumerate(contents.shards):
                path = contents.leaves[entry.leaf].path
                bad = (str(copy.folder), copy.published.digest, index) in outvoted
                if not bad and path in self._copies:
                    self._copies[path].setdefault(entry.box, []).append((copy, entry))
        self._portions = {path: self._divided(path) for path in self._leaves}
        self._last: tuple[str, Box, Array] | None = None

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Return every leaf of the save, by path."""
        return self._leaves

    def boxes(self, path: str) -> list[Box]:
        """Return the parts of a leaf that one shard each supplies."""
        return [portion.part for portion in self._portions[path]]

    def crcs(self, path: str) -> dict[Box, int]:
        """Return the CRC32C at capture of the shards that supply a part of a leaf as a whole."""
        return {
            part: self._copies[path][source][0][1].crc32c
            for source, part in self._portions[path]
            if source == part
        }

    def read(self, path: str, box: Box) -> Array:
        """Return the elements of a box; CorruptData when no sound copy of a shard is left."""
        spec = self._leaves[path]
        array = np.empty(shape_of(box), dtype_named(spec.dtype))
        for source, part in self._portions[path]:
            if intersect(part, box) is not None:
                copy_common(array, box, self._shard(path, source), source)
        return array

    def close(self) -> None:
        """Forget the shard that was read last."""
        self._last = None

    def _divided(self, path: str) -> list[Portion]:
        target = whole(self._leaves[path].global_shape)
        portions, missing = divide(target, sorted(self._copies[path]))
        if missing:
            raise LocalTierError(
                "read",
                f"leaf {path!r} of {self.name}",
                f"no ramdisk given has {describe(missing[0])}",
                hint="give the --local-dir of every host that is left",
            )
        return portions

    def _shard(self, path: str, box: Box) -> Array:
        if self._last is not None and self._last[:2] == (path, box):
            return self._last[2]
        self._last = None  # its memory is needed for the next one
        problems: list[str] = []
        for copy, entry in self._copies[path][box]:
            try:
                data = self._bytes_of(copy, entry)
            except (OSError, CorruptData, TransferError) as error:
                problems.append(f"{copy.folder}/{file_name(copy.number)}: {error}")
                continue
            self.notes += problems
            dtype = dtype_named(self._leaves[path].dtype)
            array = data.view(dtype).reshape(shape_of(box))
            self._last = (path, box, array)
            return array
        raise CorruptData(
            "read",
            f"shard {path}{describe(box)} of {self.name}",
            f"no copy is sound: {'; '.join(problems)}",
            hint="if its job runs, it may have saved over it meanwhile",
        )

    def _bytes_of(self, copy: RamCopy, entry: ShardEntry) -> Array:
        """Return a shard's bytes, whose CRC32C is that of capture."""
        if self._others is not None and self._others.has(copy.folder):
            data = self._others.shard(copy, entry)
        else:
            data = self._read_file(copy, entry)
        crc = _native.crc32c(data.data) if data.nbytes == entry.nbytes else None
        if crc != entry.crc32c:
            problem = "the CRC32C differs from that of capture"
            raise CorruptData(
                "read", file_name(copy.number), problem, expected=entry.crc32c, actual=crc
            )
        return data

    def _read_file(self, copy: RamCopy, entry: ShardEntry) -> Array:
        """Return a shard's bytes, fewer where the file is shorter."""
        with ProcessFiles.opened(copy.folder, self._owner_uid) as place:
            fd = place.open_slot(copy.number)
        data = np.empty(entry.nbytes, np.uint8)
        with open(fd, "rb", buffering=0) as file:
            file.seek(entry.offset)
            done = 0
            while done < entry.nbytes and (count := file.readinto(data.data[done:])):
                done += count
        return data[:done]
