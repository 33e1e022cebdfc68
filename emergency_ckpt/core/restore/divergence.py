"""Copies of one shard that differ: found at the vote, and left out of a restore but for one. Pure.

``find_divergence`` compares CRCs of capture time; equal replicas cost little. Every restore applies
``left_out``, one rule that gives all processes the same answer, so that replicas never stay apart.
Nobody can know which copy is right. A number of holders is no claim of that: the copy with more
holders is taken because fewer processes must then fetch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter

import msgspec

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.wording import few
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

    def describe(self) -> str:
        """Return one line that names step, leaf, box and holders."""
        sides = "; ".join(f"{crc:08x} at {few(names)}" for crc, names in self.copies)
        part = f"{self.shard.leaf}{describe(self.shard.box)}"
        return f"step {self.save.step}: copies of {part} differ: {sides}"


def find_divergence(
    save: SaveId, contents_of_holders: Mapping[str, tuple[Contents, ...]]
) -> list[Divergence]:
    """Return the shards of ``save`` whose CRC differs between its holders, sorted by shard.

    Args:
      contents_of_holders: published contents by holder name. Contents of other saves are skipped.
        Holders may share one ``Contents`` object (equal digests): it is read once.
    """
    by_contents: dict[int, tuple[Contents, list[str]]] = {}
    for holder, contents_of_holder in contents_of_holders.items():
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
    differing: list[Divergence] = []
    for shard, holders_of in sorted(crcs.items(), key=lambda item: item[0]):
        if len(holders_of) > 1:
            ranked = sorted(holders_of.items(), key=lambda item: (-len(item[1]), item[0]))
            copies = tuple((crc, tuple(sorted(names))) for crc, names in ranked)
            differing.append(Divergence(save, shard, copies))
    return differing


def _suspicious(every: Sequence[Contents]) -> set[Box]:
    """Return the boxes for which some leaf has two CRCs: few or none, of millions."""
    boxes: set[Box] = set()
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
                    boxes.add(entry.box)
    return boxes


def _compared(every: Sequence[Contents]) -> Iterator[tuple[Contents, Iterator[ShardEntry]]]:
    """Yield, for each of ``every`` that has any, the shards whose boxes others have too.

    In most jobs those are the leaves that are replicated inside a slice. Equal boxes of one
    ``Contents`` are usually one object, so they need not be compared by value.
    """
    boxes_of = [{id(box): box for box in map(_BOX, contents.shards)} for contents in every]
    count = Counter(chain.from_iterable(set(boxes.values()) for boxes in boxes_of))
    common = {box for box, times in count.items() if times > 1}
    for contents, boxes in zip(every, boxes_of, strict=True):
        shared_boxes = {number for number, box in boxes.items() if box in common}
        if shared_boxes:
            chosen = map(shared_boxes.__contains__, map(id, map(_BOX, contents.shards)))
            yield contents, compress(contents.shards, chosen)


def divergences(inventory: Inventory, save: SaveId) -> list[Divergence]:
    """Return the shards of ``save`` whose copies differ between the holders of ``inventory``."""
    contents_of_holders: dict[str, tuple[Contents, ...]] = {}
    for holder in inventory.holders:
        digests = [manifest.digest for manifest in holder.tensors if manifest.save == save]
        contents_of_holders[holder.holder] = tuple(
            inventory.manifests[digest] for digest in digests if digest in inventory.manifests
        )
    return find_divergence(save, contents_of_holders)


def left_out(
    save: SaveId,
    manifests: Mapping[str, Contents],
    holders: Mapping[str, Sequence[str]],
    damaged: Mapping[str, Mapping[str, Collection[int]]],
) -> dict[str, frozenset[int]]:
    """Return, by digest, the shards of copies that a restore of ``save`` must not use.

    Of each shard whose copies differ one CRC32C is left. The manifests of which every shard is
    intact somewhere come first. Among these a tie is broken by more holders, for fewer fetches,
    and then by the smaller digest. A shard is taken from the first manifest that has the shard. So
    whole replicas stay together, and the choice depends on nothing but the arguments.

    Args:
      manifests: contents by digest.
      holders: of each digest.
      damaged: by digest and holder, the shards that are damaged there.
    """
    if len(manifests) < 2:
        return {}
    differing = find_divergence(
        save, {digest: (contents,) for digest, contents in manifests.items()}
    )
    if not differing:
        return {}

    def rank(digest: str) -> tuple[bool, int, str]:
        bad = [set(damaged.get(digest, {}).get(holder, ())) for holder in holders[digest]]
        has_lost = not bad or bool(set[int].intersection(*bad))
        return has_lost, -len(bad), digest

    shards = {divergence.shard for divergence in differing}
    chosen: dict[ShardId, int] = {}
    excluded: dict[str, frozenset[int]] = {}
    for digest in sorted(manifests, key=rank):
        contents = manifests[digest]
        others = frozenset(
            index
            for index, entry in enumerate(contents.shards)
            if 0 <= entry.leaf < len(contents.leaves)
            and (shard := contents.shard_id(index)) in shards
            and chosen.setdefault(shard, entry.crc32c) != entry.crc32c
        )
        if others:
            excluded[digest] = others
    return excluded
