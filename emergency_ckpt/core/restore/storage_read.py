"""Assignment of a persistent step's chunks to processes, so that each byte is read once. Pure.

Storage is read in whole chunks, because a compressed chunk can only be read as a whole. So each
process gets boxes that are whole chunks, each box goes to one process, and the others fetch it
from that process. ``runs_of`` says which bytes of a box each of its chunks has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from emergency_ckpt.core.boxes import BoxIndex, split, volume
from emergency_ckpt.core.restore.plan_types import TargetSet
from emergency_ckpt.types import Box, ShardId

TOLERANCE = 0.02
"""Excess over its share that a process may read before large boxes are split."""

_PIECES_PER_PROCESS = (None, 4, 16, 64)
"""Divisions in order of attempts: whole boxes, then this many pieces per process's share."""


_MOST_TILES = 1024
"""Minimum number of unsaved boxes that may be constructed."""


class StoredArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Format of one leaf in storage.

    Attributes:
      name: Orbax's name of the array in the step.
      shape: of the whole array; chunks begin at its origin, the last of an axis may be cut off.
      item_bytes: bytes of one element.
      driver: TensorStore's name of the array format.
      ocdbt: True when the arrays share one OCDBT database.
      plain: True when the bytes of a chunk are those of its elements, in C order and little-endian.
      item: the folder of its Orbax item, where the step's arrays are in several.
    """

    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    item_bytes: int
    driver: str = "zarr"
    ocdbt: bool = True
    item: str = ""
    plain: bool = False

    @property
    def full_name(self) -> str:
        """Name among all arrays of the step, with the keys of a path separated by dots."""
        return f"{self.item}.{self.name}" if self.item else self.name


@dataclass(frozen=True)
class _Unit:
    """A box that one process reads, and the processes that need it."""

    size_bytes: int
    shard: ShardId
    needed_by: tuple[int, ...]


def assign_reads(
    targets: Mapping[int, TargetSet],
    arrays: Mapping[str, StoredArray],
    saved: Mapping[str, Collection[Box]] = MappingProxyType({}),
) -> dict[int, tuple[ShardId, ...]]:
    """Return the boxes that each process reads from storage, sorted.

    The boxes of all processes together hold every element of every target, and no chunk is in two
    of them. A box goes to a process that needs it if the balance allows: no process reads more than
    its share by over ``TOLERANCE``, or, where that is too coarse, by over one chunk or saved box.

    Saved boxes are never split, so that the process that reads one can check its CRC before another
    process gets it. Other boxes are those of the targets, if these are whole chunks, split only for
    the balance. Targets without elements need no read. Deterministic.

    Args:
      targets: shards that each process of the job needs. Share the tuple between equal ones.
      arrays: stored format of each leaf. Leaves that are not named here are not read.
      saved: boxes of each leaf with known CRCs; some may be missing.
    """
    needs = _needs_of(targets, arrays)
    saved_boxes = {leaf: frozenset(saved.get(leaf, ())) for leaf in needs}
    for leaf, boxes in needs.items():
        cut = _tiles(saved_boxes[leaf], arrays[leaf])
        if cut:
            needs[leaf] = _needing(cut, boxes)
    total_bytes = 0
    assigned: dict[int, list[ShardId]] = {}
    for pieces in _PIECES_PER_PROCESS:
        share_bytes = total_bytes / len(targets)
        limit_bytes = None if pieces is None else max(1, int(share_bytes / pieces))
        units = _units(needs, arrays, saved_boxes, limit_bytes)
        total_bytes = sum(unit.size_bytes for unit in units)
        assigned, most_bytes = _deal(units, sorted(targets))
        if most_bytes <= (1 + TOLERANCE) * total_bytes / len(targets):
            break
    return {process: tuple(sorted(shards)) for process, shards in assigned.items()}


def _needs_of(
    targets: Mapping[int, TargetSet], arrays: Mapping[str, StoredArray]
) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return the processes that need each box with elements, sorted, by leaf and box."""
    groups: dict[int, tuple[TargetSet, list[int]]] = {}
    for process in sorted(targets):
        groups.setdefault(id(targets[process]), (targets[process], []))[1].append(process)
    members_by_leaf: dict[str, dict[Box, list[list[int]]]] = {}
    for target, members in groups.values():
        for shard in target:
            if shard.leaf in arrays and volume(shard.box):
                members_by_leaf.setdefault(shard.leaf, {}).setdefault(shard.box, []).append(members)
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    needs: dict[str, dict[Box, tuple[int, ...]]] = {}
    for leaf, boxes in members_by_leaf.items():
        needs[leaf] = {}
        for box, lists in boxes.items():
            members = tuple(sorted({process for group in lists for process in group}))
            needs[leaf][box] = shared.setdefault(members, members)
    return needs


def _units(
    needs: Mapping[str, Mapping[Box, tuple[int, ...]]],
    arrays: Mapping[str, StoredArray],
    saved: Mapping[str, Collection[Box]],
    limit_bytes: int | None,
) -> list[_Unit]:
    """Return boxes of whole chunks, no larger than the limit where chunks allow, largest first.

    Boxes in ``saved`` are not split.
    """
    units: list[_Unit] = []
    for leaf in sorted(needs):
        array, boxes = arrays[leaf], needs[leaf]
        if not _are_whole_chunks(boxes, array):
            boxes = _blocks(boxes, array, limit_bytes)
        for box, members in boxes.items():
            limit = None if box in saved[leaf] else limit_bytes
            for piece in split(box, array.chunk_shape, array.item_bytes, limit):
                units.append(_Unit(_size_bytes(piece, array), ShardId(leaf, piece), members))
    units.sort(key=lambda unit: (-unit.size_bytes, unit.shard))
    return units


def _size_bytes(box: Box, array: StoredArray) -> int:
    return volume(box) * array.item_bytes


def _are_whole_chunks(boxes: Iterable[Box], array: StoredArray) -> bool:
    """Return whether the distinct boxes consist of whole chunks and share none."""
    boxes = list(boxes)
    for axis, (size, chunk) in enumerate(zip(array.shape, array.chunk_shape, strict=True)):
        spans = sorted({box[axis] for box in boxes})
        if any(start % chunk or (stop % chunk and stop != size) for start, stop in spans):
            return False
        if any(first[1] > second[0] for first, second in pairwise(spans)):
            return False
    return True


def _tiles(saved: Collection[Box], array: StoredArray) -> list[Box]:
    """Return the saved boxes, and those that the same cuts make of the rest of the array; sorted.

    Empty when the saved boxes are not whole chunks, or too few to infer the cuts.
    """
    if not saved or not _are_whole_chunks(saved, array):
        return []
    cuts: list[list[tuple[int, int]]] = []
    for axis, size in enumerate(array.shape):
        spans = sorted({box[axis] for box in saved})
        ends = [0, *(stop for _, stop in spans)]
        starts = [*(start for start, _ in spans), size]
        gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        cuts.append(sorted([*spans, *gaps]))
    if prod(map(len, cuts)) > _MOST_TILES + 2 * len(saved):
        return []
    return list(product(*cuts))


def _blocks(
    boxes: Mapping[Box, tuple[int, ...]], array: StoredArray, limit_bytes: int | None
) -> dict[Box, tuple[int, ...]]:
    """Return blocks of whole chunks that touch a box, and the processes that need them.

    For targets that cut through chunks, when the state was saved from another mesh. Blocks are
    about as large as the targets, so that their number stays similar.
    """
    block_bytes = min(_size_bytes(box, array) for box in boxes)
    if limit_bytes is not None:
        block_bytes = min(block_bytes, limit_bytes)
    block = list(array.chunk_shape)
    for axis in reversed(range(len(block))):
        while block[axis] < array.shape[axis] and 2 * prod(block) * array.item_bytes <= block_bytes:
            block[axis] = min(2 * block[axis], -(-array.shape[axis] // block[axis]) * block[axis])
    cuts = [
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(array.shape, block, strict=True)
    ]
    return _needing(product(*cuts), boxes)


def _needing(
    parts: Iterable[Box], boxes: Mapping[Box, tuple[int, ...]]
) -> dict[Box, tuple[int, ...]]:
    """Return those of ``parts`` that touch a needed box, and the processes that need them."""
    index = BoxIndex(boxes)
    needed: dict[Box, tuple[int, ...]] = {}
    for part in parts:
        if part in boxes:
            needed[part] = boxes[part]
            continue
        touching = index.touching(part)
        if touching:
            needed[part] = tuple(sorted({p for box in touching for p in boxes[box]}))
    return needed


def _deal(units: Sequence[_Unit], processes: Sequence[int]) -> tuple[dict[int, list[ShardId]], int]:
    """Give each unit to the least loaded process that needs it or, above its share, of all.

    Returns the shards of each process, and the bytes of the process that reads most.
    """
    share_bytes = sum(unit.size_bytes for unit in units) / len(processes)
    loads = _Loads(processes)
    dealt: dict[int, list[ShardId]] = {process: [] for process in processes}
    everyone = tuple(processes)
    for unit in units:
        chosen = loads.least(unit.needed_by)
        if loads.bytes_of[chosen] + unit.size_bytes > (1 + TOLERANCE / 2) * share_bytes:
            other = loads.least(everyone)
            if loads.bytes_of[other] < loads.bytes_of[chosen]:
                chosen = other
        dealt[chosen].append(unit.shard)
        loads.add(chosen, unit.size_bytes)
    return dealt, max(loads.bytes_of.values())


class _Loads:
    """Bytes given to each process, and the least loaded of a group without a scan."""

    def __init__(self, processes: Iterable[int]) -> None:
        self.bytes_of = dict.fromkeys(processes, 0)
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, process: int, size_bytes: int) -> None:
        self.bytes_of[process] += size_bytes

    def least(self, group: tuple[int, ...]) -> int:
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = [(self.bytes_of[process], process) for process in group]
            heapify(heap)
        while True:
            queued_bytes, process = heap[0]
            actual = self.bytes_of[process]
            if queued_bytes == actual:
                return process
            # Loads only grow, so an outdated entry moves down the heap to its place.
            heappop(heap)
            heappush(heap, (actual, process))


_MOST_RUNS = 4096
"""Maximum number of runs of a box. One of more chunks is left to the storage format's library."""

_REMEMBERED = 1024
"""Thousands of leaves have few shapes."""


class ChunkRun(NamedTuple):
    """The first ``nbytes`` of a chunk, as they follow each other in a box.

    Attributes:
      chunk: index of the chunk in the array's grid of chunks.
    """

    chunk: tuple[int, ...]
    nbytes: int


def runs_of(box: Box, array: StoredArray) -> tuple[ChunkRun, ...] | None:
    """Return the runs that make up the bytes of ``box`` in C order.

    None when the box is not made of whole chunks, or when the bytes of its chunks alternate in it.
    """
    return _runs_of(box, array.shape, array.chunk_shape, array.item_bytes)


@lru_cache(_REMEMBERED)
def _runs_of(
    box: Box, shape: tuple[int, ...], chunk_shape: tuple[int, ...], item_bytes: int
) -> tuple[ChunkRun, ...] | None:
    if not box:
        return (ChunkRun((), item_bytes),)
    # The first axis along which a chunk has several elements, else the last.
    last = len(chunk_shape) - 1
    along = next((axis for axis in range(last) if chunk_shape[axis] > 1), last)
    grids: list[range] = []
    for axis, ((start, stop), chunk) in enumerate(zip(box, chunk_shape, strict=True)):
        is_complete = start % chunk == 0 and (stop % chunk == 0 or stop == shape[axis])
        if not is_complete or (axis > along and stop - start != chunk):
            return None
        grids.append(range(start // chunk, -(-stop // chunk)))
    if prod(map(len, grids)) > _MOST_RUNS:
        return None
    row_bytes = prod(chunk_shape[along + 1 :]) * item_bytes
    step, end = chunk_shape[along], box[along][1]
    return tuple(
        ChunkRun(chunk, (min((chunk[along] + 1) * step, end) - chunk[along] * step) * row_bytes)
        for chunk in product(*grids)
    )
