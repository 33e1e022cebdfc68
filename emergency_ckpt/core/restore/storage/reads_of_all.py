"""The reads of a persistent step on a file system that all processes share in memory. Pure.

Where all processes of the job run on one machine, its page cache has a byte that one of them has
read. A copy from there costs less than one from another process, so each process reads all that it
needs. Each box has one process that must read it nevertheless: the others leave it out when their
RAM has no room for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from emergency_ckpt.core.boxes import BoxIndex, intersect, volume
from emergency_ckpt.core.restore.plan_types import TargetSet
from emergency_ckpt.core.restore.storage.chunk_runs import are_stacked
from emergency_ckpt.core.restore.storage_read import (
    StoredArray,
    are_whole_chunks,
    blocks,
    needs_of,
    tiles,
)
from emergency_ckpt.types import Box, ShardId

_Boxes = tuple[Box, ...]


class BoxRead(NamedTuple):
    """A box to read, and the saved boxes of which it is made, one after the other in its bytes."""

    shard: ShardId
    parts: _Boxes


class _Users(NamedTuple):
    """The processes that need some of a box, and those that need all of it at once; sorted."""

    any: tuple[int, ...]
    all: tuple[int, ...]


class ProcessReads(NamedTuple):
    """The reads of one process, sorted.

    Attributes:
      own: each box of the step that any process needs is one of these for one process.
      more: boxes that this process needs and that another one reads too.
    """

    own: tuple[BoxRead, ...]
    more: tuple[BoxRead, ...]


def assign_reads_to_all(
    targets: Mapping[int, TargetSet],
    arrays: Mapping[str, StoredArray],
    saved: Mapping[str, Collection[Box]],
) -> dict[int, ProcessReads]:
    """Return the boxes that each process reads. Deterministic.

    A box is what a process needs, where the saved boxes of which it is made follow each other in
    its bytes and no other process needs them otherwise; else each saved box is one. So nothing has
    to be put together again in new memory. The arguments are those of ``assign_reads``.
    """
    reads: list[tuple[BoxRead, _Users]] = []
    # Leaves of one shape and sharding are read alike.
    alike: dict[object, list[tuple[Box, _Boxes, _Users]]] = {}
    for leaf, needed in sorted(needs_of(targets, arrays).items()):
        array, boxes = arrays[leaf], tuple(sorted(saved.get(leaf, ())))
        key = (array.shape, array.chunk_shape, array.item_bytes, boxes, tuple(needed.items()))
        if key not in alike:
            alike[key] = [
                (box, parts, _users_of(box, needed))
                for box, parts in _boxes_of(needed, array, boxes)
            ]
        for box, parts, users in alike[key]:
            reads.append((BoxRead(ShardId(leaf, box), parts), users))
    own: dict[int, list[BoxRead]] = {process: [] for process in targets}
    more: dict[int, list[BoxRead]] = {process: [] for process in targets}
    loads = dict.fromkeys(targets, 0)
    for read, users in sorted(reads):
        reader = min(users.any, key=lambda process: (loads[process], process))
        loads[reader] += volume(read.shard.box) * arrays[read.shard.leaf].item_bytes
        own[reader].append(read)
        for process in users.all:
            if process != reader:
                more[process].append(read)
    return {process: ProcessReads(tuple(own[process]), tuple(more[process])) for process in targets}


def _boxes_of(
    needed: Mapping[Box, tuple[int, ...]], array: StoredArray, saved: Collection[Box]
) -> Iterable[tuple[Box, _Boxes]]:
    """Yield the boxes to read of one leaf, with their parts."""
    cut = tiles(frozenset(saved), array)
    if not cut:
        found = needed if are_whole_chunks(needed, array) else blocks(needed, array, None)
        yield from ((box, (box,)) for box in found)
        return
    index = BoxIndex(cut)
    touched = {box: index.touching(box) for box in needed}
    uses: dict[Box, int] = {}
    for parts in touched.values():
        for part in parts:
            uses[part] = uses.get(part, 0) + 1
    seen: set[Box] = set()
    for box, parts in touched.items():
        if all(uses[part] == 1 for part in parts) and are_stacked(parts, box):
            yield box, tuple(parts)
            continue
        for part in parts:
            if part not in seen:
                seen.add(part)
                yield part, (part,)


def _users_of(box: Box, needed: Mapping[Box, Sequence[int]]) -> _Users:
    if box in needed:
        return _Users(tuple(needed[box]), tuple(needed[box]))
    some: set[int] = set()
    whole: set[int] = set()
    for target, members in needed.items():
        common = intersect(box, target)
        if common is not None:
            some.update(members)
        if common == box:
            whole.update(members)
    return _Users(tuple(sorted(some)), tuple(sorted(whole)))
