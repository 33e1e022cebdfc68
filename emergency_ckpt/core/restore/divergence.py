"""Silent data corruption: replicas that should be equal bit for bit and differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter

import msgspec

from emergency_ckpt.core.restore.plan_types import few
from emergency_ckpt.types import Box, Contents, SaveId, ShardEntry, ShardId

_BOX: Callable[[ShardEntry], Box] = attrgetter("box")


class Divergence(msgspec.Struct, frozen=True, order=True):
    """Copies of one shard of one save that had different CRCs when they were captured.

    Attributes:
      copies: (CRC32C, holders that have it), the CRC of most holders first.
    """

    save: SaveId
    shard: ShardId
    copies: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def of(cls, save: SaveId, shard: ShardId, holders: Mapping[int, set[str]]) -> Divergence:
        """Return the divergence with the holders of each CRC in order."""
        ranked = sorted(holders.items(), key=lambda item: (-len(item[1]), item[0]))
        return cls(save, shard, tuple((crc, tuple(sorted(names))) for crc, names in ranked))

    def describe(self) -> str:
        """Return one line that names step, leaf, box and holders."""
        ranges = ", ".join(f"{start}:{stop}" for start, stop in self.shard.box)
        sides = "; ".join(f"{crc:08x} at {few(names)}" for crc, names in self.copies)
        return f"step {self.save.step}: copies of {self.shard.leaf}[{ranges}] differ: {sides}"


def find_divergence(save: SaveId, held: Mapping[str, tuple[Contents, ...]]) -> list[Divergence]:
    """Return the shards of ``save`` whose CRC differs between its holders, sorted by shard.

    Args:
      held: published contents by holder name. Contents of other saves are skipped.
        Holders may share one ``Contents`` object (equal digests): it is read once.
    """
    by_contents: dict[int, tuple[Contents, list[str]]] = {}
    for holder, contents_of_holder in held.items():
        for contents in contents_of_holder:
            if contents.save == save:
                by_contents.setdefault(id(contents), (contents, []))[1].append(holder)
    suspicious = _suspicious([contents for contents, _ in by_contents.values()])
    if not suspicious:
        return []
    crcs: dict[ShardId, dict[int, set[str]]] = {}
    for contents, holders in by_contents.values():
        paths = [leaf.path for leaf in contents.leaves]
        for entry in contents.shards:
            if entry.box in suspicious and 0 <= entry.leaf < len(paths):
                shard = ShardId(paths[entry.leaf], entry.box)
                crcs.setdefault(shard, {}).setdefault(entry.crc32c, set()).update(holders)
    return [
        Divergence.of(save, shard, by_crc)
        for shard, by_crc in sorted(crcs.items(), key=lambda item: item[0])
        if len(by_crc) > 1
    ]


def _suspicious(every: Sequence[Contents]) -> set[Box]:
    """Return the boxes for which some leaf has two CRCs: few or none, of millions."""
    found: set[Box] = set()
    by_path: dict[str, dict[Box, int]] = {}
    by_leaves: dict[int, list[dict[Box, int]]] = {}  # nearly all share one object
    for contents, entries in _compared(every):
        seen = by_leaves.get(id(contents.leaves))
        if seen is None:
            seen = [by_path.setdefault(leaf.path, {}) for leaf in contents.leaves]
            by_leaves[id(contents.leaves)] = seen
        for entry in entries:
            if 0 <= entry.leaf < len(seen):
                crc = entry.crc32c
                if seen[entry.leaf].setdefault(entry.box, crc) != crc:
                    found.add(entry.box)
    return found


def _compared(every: Sequence[Contents]) -> Iterator[tuple[Contents, Iterator[ShardEntry]]]:
    """Yield, for each of ``every`` that has any, the shards whose boxes others have too.

    In most jobs those are the leaves that are replicated inside a slice. Equal boxes of one
    ``Contents`` are usually one object, so they need not be compared by value.
    """
    boxes_of = [{id(box): box for box in map(_BOX, contents.shards)} for contents in every]
    count = Counter(chain.from_iterable(set(boxes.values()) for boxes in boxes_of))
    common = {box for box, times in count.items() if times > 1}
    for contents, boxes in zip(every, boxes_of, strict=True):
        wanted = {number for number, box in boxes.items() if box in common}
        if wanted:
            chosen = map(wanted.__contains__, map(id, map(_BOX, contents.shards)))
            yield contents, compress(contents.shards, chosen)
