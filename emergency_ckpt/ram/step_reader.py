"""A step in RAM, put together from the parts that several holders have of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import Portion, describe, divide, intersect, shape_of, whole
from emergency_ckpt.core.restore.divergence import divergences, left_out
from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    HolderInventory,
    Inventory,
)
from emergency_ckpt.core.restore.restore_plan import choose_host_states, filter_inventory
from emergency_ckpt.errors import CorruptData, HostStateError, LocalTierError, TransferError
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.tier import Array, HeldDocument, ShardCopies, copy_common
from emergency_ckpt.types import Box, Contents, LeafSpec, SaveId, ShardEntry

_UNSOUND = (OSError, CorruptData, LocalTierError, TransferError)


class SlotCopy(NamedTuple):
    """A part of a step that one holder has published.

    Attributes:
      holder: its name in the inventory.
      place: of the slot, for messages.
      read: returns the bytes of a shard, fewer where they end before; valid until the next call.
        OSError, CheckpointError.
    """

    holder: str
    place: str
    digest: str
    contents: Contents
    read: Callable[[ShardEntry], Array]


class DocumentCopy(NamedTuple):
    """A host state that one holder has. ``read``: returns it. OSError, CheckpointError."""

    holder: str
    held: HeldHostState
    read: Callable[[], bytes]


class RamStep:
    """A save in RAM; see ``StepReader``. CRC32Cs are compared at every read.

    Args:
      copies: at least one.
      documents: its host states, of all holders.

    Of copies that differ those are read that a restore would take.
    """

    saved_s: float | None = None
    metrics: Mapping[str, Any] | None = None

    def __init__(
        self, save: SaveId, copies: Sequence[SlotCopy], documents: Sequence[DocumentCopy]
    ) -> None:
        self.save = save
        self.name = f"step {save.step} in RAM"
        self._slots = copies
        self._documents = documents
        self._inventory = _inventory(copies, documents)
        self.leaves: Mapping[str, LeafSpec] = {
            leaf.path: leaf for leaf in copies[0].contents.leaves
        }
        self.notes = [divergence.describe() for divergence in divergences(self._inventory, save)]
        holders: dict[str, list[str]] = {}
        for copy in copies:
            holders.setdefault(copy.digest, []).append(copy.holder)
        others = left_out(save, {copy.digest: copy.contents for copy in copies}, holders, {})
        self._copies: dict[str, dict[Box, list[tuple[SlotCopy, ShardEntry]]]]
        self._copies = {path: {} for path in self.leaves}
        for copy in copies:
            for index, entry in enumerate(copy.contents.shards):
                path = copy.contents.leaves[entry.leaf].path
                is_taken = index not in others.get(copy.digest, ())
                if is_taken and path in self._copies:
                    self._copies[path].setdefault(entry.box, []).append((copy, entry))
        self._portions: dict[str, list[Portion]] = {}
        self._last: tuple[str, Box, Array] | None = None

    def copies(self, path: str) -> list[ShardCopies]:
        """Return what the holders have of a leaf, also what is not taken."""
        return self._held.get(path, [])

    @functools.cached_property
    def _held(self) -> dict[str, list[ShardCopies]]:
        holders: dict[tuple[str, Box, int], list[str]] = {}
        for copy in self._slots:
            for entry in copy.contents.shards:
                path = copy.contents.leaves[entry.leaf].path
                holders.setdefault((path, entry.box, entry.crc32c), []).append(copy.holder)
        by_leaf: dict[str, list[ShardCopies]] = {}
        for (path, box, crc), names in sorted(holders.items()):
            by_leaf.setdefault(path, []).append(ShardCopies(box, crc, tuple(names)))
        return by_leaf

    def boxes(self, path: str) -> list[Box]:
        """Return the parts of a leaf that one shard each supplies. LocalTierError."""
        return [portion.part for portion in self._divided(path)]

    def crcs(self, path: str) -> dict[Box, int]:
        """Return the CRC32C at capture of the shards that supply a part of a leaf as a whole."""
        return {
            part: self._copies[path][source][0][1].crc32c
            for source, part in self._divided(path)
            if source == part
        }

    def read(self, path: str, box: Box) -> Array:
        """Return the elements of a box; CorruptData when no sound copy of a shard is left."""
        spec = self.leaves[path]
        array = np.empty(shape_of(box), dtype_named(spec.dtype))
        for source, part in self._divided(path):
            if intersect(part, box) is not None:
                copy_common(array, box, self._shard(path, source), source)
        return array

    def documents(self) -> list[HeldDocument]:
        """Return its host states, by process and digest."""
        holders: dict[HeldHostState, list[str]] = {}
        for copy in self._documents:
            holders.setdefault(copy.held, []).append(copy.holder)
        return [
            HeldDocument(host_state, tuple(names)) for host_state, names in sorted(holders.items())
        ]

    def document(self, held: HeldHostState) -> bytes:
        """Return the document of the first holder of the host state ``held``. CorruptData."""
        return self._sound(held.owner, [copy for copy in self._documents if copy.held == held])

    def host_states(self) -> dict[int, bytes]:
        """Return the set of documents that a restore would take. HostStateError, CorruptData."""
        saves = filter_inventory(self._inventory).saves
        part = next((part for part in saves if part.save == self.save), None)
        chosen = "no host state is held anywhere" if part is None else choose_host_states(part, 0)
        if isinstance(chosen, str):
            raise HostStateError("read", f"host states of {self.name}", chosen)
        documents: dict[int, bytes] = {}
        for owner, (digest, names) in chosen.copies.items():
            of_owner = [
                copy
                for name in names
                for copy in self._documents
                if copy.holder == name
                and (copy.held.owner, copy.held.count, copy.held.digest)
                == (owner, chosen.count, digest)
            ]
            documents[owner] = self._sound(owner, of_owner)
        return documents

    def close(self) -> None:
        """Forget the shard that was read last."""
        self._last = None

    def _sound(self, owner: int, copies: Sequence[DocumentCopy]) -> bytes:
        problems: list[str] = []
        for copy in copies:
            try:
                data = copy.read()
                if decode(data).digest == copy.held.digest:
                    return data
                problems.append(f"{copy.holder}: it was replaced")
            except _UNSOUND as error:
                problems.append(f"{copy.holder}: {error}")
        target = f"host state of process {owner} of {self.name}"
        raise CorruptData("read", target, f"no copy is sound: {'; '.join(problems)}")

    def _divided(self, path: str) -> list[Portion]:
        if path not in self._portions:
            target = whole(self.leaves[path].global_shape)
            portions, missing = divide(target, sorted(self._copies[path]))
            if missing:
                raise LocalTierError(
                    "read",
                    f"leaf {path!r} of {self.name}",
                    f"no ramdisk given has {describe(missing[0])}",
                    hint="give the --local-dir of every host that is left",
                )
            self._portions[path] = portions
        return self._portions[path]

    def _shard(self, path: str, box: Box) -> Array:
        if self._last is not None and self._last[:2] == (path, box):
            return self._last[2]
        self._last = None  # its memory is needed for the next one
        problems: list[str] = []
        for copy, entry in self._copies[path][box]:
            try:
                data = _checked(copy, entry)
            except _UNSOUND as error:
                problems.append(f"{copy.place}: {error}")
                continue
            self.notes += problems
            array = data.view(dtype_named(self.leaves[path].dtype)).reshape(shape_of(box))
            self._last = (path, box, array)
            return array
        raise CorruptData(
            "read",
            f"shard {path}{describe(box)} of {self.name}",
            f"no copy is sound: {'; '.join(problems)}",
            hint="if its job runs, it may have saved over it meanwhile",
        )


def _checked(copy: SlotCopy, entry: ShardEntry) -> Array:
    """Return a shard's bytes, whose CRC32C is that of capture."""
    data = copy.read(entry)
    crc = _native.crc32c(data.data) if data.nbytes == entry.nbytes else None
    if crc != entry.crc32c:
        problem = "the CRC32C differs from that of capture"
        raise CorruptData("read", copy.place, problem, expected=entry.crc32c, actual=crc)
    return data


def _inventory(copies: Sequence[SlotCopy], documents: Sequence[DocumentCopy]) -> Inventory:
    holders = tuple(
        HolderInventory(
            holder=name,
            process_index=None,
            address="",
            tensors=tuple(
                HeldTensors(c.contents.save, c.digest) for c in copies if c.holder == name
            ),
            host_states=tuple(document.held for document in documents if document.holder == name),
        )
        for name in sorted({copy.holder for copy in (*copies, *documents)})
    )
    return Inventory(holders, {copy.digest: copy.contents for copy in copies})
