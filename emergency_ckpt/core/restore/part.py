"""The shards that one process reads itself, and from whom it fetches the others. Pure.

Each process chooses for itself among the ``Copies`` of its part. ``own_shards`` finds what the
process has in its own RAM; what is missing after the check of these, ``fetch_groups`` divides over
the holders. Each process begins at its own place in the lists of holders, so that the load spreads
without a plan. A group names every manifest with its shards: where no holder of the first manifest
answers, the process asks the holders of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.restore.plan_types import (
    Bundle,
    Copies,
    FetchGroup,
    ManifestHolders,
    OwnManifest,
    TargetSet,
)
from emergency_ckpt.types import Contents, ShardId

_T = TypeVar("_T")

MAX_FETCHES = 8
"""A process draws its part from at most about so many holders at once."""


def own_shards(
    copies: Copies, targets: TargetSet, contents: Mapping[str, Contents]
) -> list[FetchGroup]:
    """Return the shards that the process has in its own RAM, one group without sources a manifest.

    ``contents``: of each manifest of ``copies.own``.
    """
    shards = _wanted(copies, targets)
    groups: list[FetchGroup] = []
    for own in copies.own:
        unusable, indices = set(own.unusable), list[int]()
        for shard, index in shards_of(contents[own.digest]):
            if shard in shards and index not in unusable:
                shards.remove(shard)
                indices.append(index)
        if indices:
            groups.append(FetchGroup(own.digest, tuple(indices), ()))
    return groups


def fullest_first(
    copies: Copies,
    targets: TargetSet,
    contents: Mapping[str, Contents],
    retained: Container[ShardId] | None,
) -> Copies:
    """Return ``copies`` with the own manifests first that have most of what the process keeps.

    So a manifest that alone has all of that is the one whose shards are verified. ``retained``: the
    shards that the process keeps; None: all that it needs.
    """
    to_keep = {shard for shard in _wanted(copies, targets) if retained is None or shard in retained}

    def count(own: OwnManifest) -> int:
        unusable, shards = set(own.unusable), shards_of(contents[own.digest])
        return sum(shard in to_keep and index not in unusable for shard, index in shards)

    in_order = sorted(copies.own, key=count, reverse=True)
    return msgspec.structs.replace(copies, own=tuple(in_order))


def missing_shards(
    copies: Copies, targets: TargetSet, present: Collection[ShardId]
) -> list[ShardId]:
    """Return the shards with elements that the process needs beside those that are ``present``."""
    return [
        shard
        for bundle in copies.bundles
        for shard in _shards_in(bundle, targets)
        if shard not in present and volume(shard.box)
    ]


def fetch_groups(
    copies: Copies,
    targets: TargetSet,
    missing: Collection[ShardId],
    me: str,
    contents_of: Callable[[Sequence[ManifestHolders], Collection[ShardId]], tuple[str, Contents]],
) -> list[FetchGroup]:
    """Return from whom the process fetches the ``missing`` shards.

    A shard whose only copy is the process's own is in no group.

    Args:
      me: name of the process as a holder.
      contents_of: returns the manifest of the first of these sources that answers, which has all
        these shards, after the digest of the manifest.
    """
    lacking: dict[tuple[ManifestHolders, ...], list[ShardId]] = {}
    at_hand = {own.digest for own in copies.own}  # each other manifest has to be fetched first
    for bundle in copies.bundles:
        shards = [shard for shard in _shards_in(bundle, targets) if shard in missing]
        sources = tuple(
            ManifestHolders(source.digest, _from(holders, copies.place))
            for source in bundle.sources
            if (holders := tuple(holder for holder in source.holders if holder != me))
        )
        if not shards or not sources:
            continue
        in_order = _from(sources, copies.place)
        chosen = next((source for source in sources if source.digest in at_hand), in_order[0])
        at_hand.add(chosen.digest)
        others = (source for source in in_order if source is not chosen)
        lacking.setdefault((chosen, *others), []).extend(shards)
    manifests: dict[str, Contents] = {}
    fetched: dict[ManifestHolders, list[ShardId]] = {}
    alternates: dict[ManifestHolders, dict[ManifestHolders, None]] = {}
    for sources, shards in lacking.items():
        digest, manifests[digest] = contents_of(sources, shards)
        source = next(source for source in sources if source.digest == digest)
        fetched.setdefault(source, []).extend(shards)
        alternates.setdefault(source, {}).update((s, None) for s in sources if s != source)
    parts = max(1, MAX_FETCHES // max(1, len(fetched)))
    groups: list[FetchGroup] = []
    for source, shards in fetched.items():
        contents = manifests[source.digest]
        index_of = dict(shards_of(contents))
        indices = sorted(index_of[shard] for shard in shards)
        nbytes = [contents.shards[index].nbytes for index in indices]
        others = tuple(alternates[source])
        for number, part in enumerate(_even(nbytes, min(parts, len(source.holders)))):
            chosen = tuple(sorted(indices[position] for position in part))
            holders = _from(source.holders, number)
            groups.append(FetchGroup(source.digest, chosen, holders, others))
    return sorted(groups, key=lambda group: (group.digest, group.sources))


def shards_of(contents: Contents) -> Iterator[tuple[ShardId, int]]:
    """Yield each shard of a manifest and its index; a shard of a leaf that is not there is none."""
    for index, entry in enumerate(contents.shards):
        if 0 <= entry.leaf < len(contents.leaves):
            yield contents.shard_id(index), index


def has_shards(contents: Contents, shards: Collection[ShardId]) -> bool:
    """Return whether a manifest has all of ``shards``."""
    return dict(shards_of(contents)).keys() >= set(shards)


def same_shards(
    shards: Sequence[int], contents: Contents, other: Contents
) -> list[tuple[int, int]]:
    """Return those of ``shards`` that ``other`` has with the same content, and their index there.

    A copy with other bytes is no damaged copy: the choice of the restore is another one.
    """
    if other is contents:
        return [(shard, shard) for shard in shards]
    index_of = dict(shards_of(other))
    pairs = [(shard, index_of.get(contents.shard_id(shard))) for shard in shards]

    def content(of: Contents, index: int) -> tuple[int, int]:
        return of.shards[index].nbytes, of.shards[index].crc32c

    return [
        (shard, index)
        for shard, index in pairs
        if index is not None and content(contents, shard) == content(other, index)
    ]


def _wanted(copies: Copies, targets: TargetSet) -> set[ShardId]:
    return {*targets, *(shard for bundle in copies.bundles for shard in bundle.others)}


def _shards_in(bundle: Bundle, targets: TargetSet) -> list[ShardId]:
    places = range(len(targets)) if bundle.targets is None else bundle.targets
    return [*(targets[place] for place in places), *bundle.others]


def _from(items: tuple[_T, ...], place: int) -> tuple[_T, ...]:
    start = place % len(items)
    return items[start:] + items[:start]


def _even(nbytes: Sequence[int], count: int) -> list[list[int]]:
    """Return the positions of ``nbytes`` in at most ``count`` parts, the largest part first.

    Each position goes to the part with the fewest bytes so far, the largest shards first.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for position in sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(position)
        loads[least] += nbytes[position]
    filled = [number for number in range(count) if parts[number]]
    return [parts[number] for number in sorted(filled, key=loads.__getitem__, reverse=True)]
