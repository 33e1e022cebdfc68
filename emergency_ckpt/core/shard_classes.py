"""Shards that processes with equal needs get from the same holders: looked at together, once.

Replicas publish equal manifests, so the shards that a process needs fall into few classes: one for
each manifest that its replicas have, and one for what all of them have. Plans are made of classes;
shards are looked at one by one only here, once for all processes that need the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from emergency_ckpt.core.boxes import is_empty
from emergency_ckpt.core.plan_types import TargetSet
from emergency_ckpt.core.save_tensors import SaveTensors
from emergency_ckpt.types import Box, ShardId

_LEAF, _BOX, _NBYTES = attrgetter("leaf"), attrgetter("box"), attrgetter("nbytes")


@dataclass(frozen=True)
class Column:
    """A manifest that has every shard of a class, and the holders that have them all intact."""

    digest: str
    holders: tuple[str, ...]
    indices: tuple[int, ...]


@dataclass
class ShardClass:
    """Shards with the same holders.

    Attributes:
      columns: the manifests that have them, sorted by digest.
      nbytes: of each shard, in the order of every column's ``indices``.
      is_empty: the shards have no elements: nobody need fetch them.
    """

    columns: tuple[Column, ...]
    nbytes: tuple[int, ...]
    size_bytes: int
    is_empty: bool
    _parts: dict[tuple[int, int], list[tuple[int, tuple[int, ...] | None]]] = field(
        default_factory=dict[tuple[int, int], list[tuple[int, tuple[int, ...] | None]]]
    )

    def parts(
        self, column: int, count: int, shard_count: int
    ) -> list[tuple[int, tuple[int, ...] | None]]:
        """The class in up to ``count`` even parts: (bytes, shards of the column's manifest).

        The largest part first; the same for every column. None: all shards of the manifest, of
        which there are ``shard_count``.
        """
        key = column, count
        found = self._parts.get(key)
        if found is None:
            indices = self.columns[column].indices
            whole = len(indices) == shard_count
            found = self._parts[key] = [
                (
                    sum(self.nbytes[place] for place in places),
                    None
                    if whole and len(places) == shard_count
                    else tuple(sorted(indices[place] for place in places)),
                )
                for places in _even(self.nbytes, count)
            ]
            found.sort(key=lambda part: -part[0])
        return found


@lru_cache(maxsize=256)
def _even(nbytes: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Deal the places out, the largest first, each to the part with the fewest bytes.

    Remembered: the manifests of a large job differ in their boxes, seldom in their sizes.
    """
    if count == 1:
        return (tuple(range(len(nbytes))),)
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(place)
        loads[least] += nbytes[place]
    return tuple(tuple(part) for part in parts if part)


@dataclass
class Needs:
    """The classes of one target set, and what of it is held nowhere."""

    classes: list[ShardClass]
    missing: list[ShardId]


def classify(tensors: SaveTensors, target: TargetSet, hints: Iterable[str]) -> Needs:
    """The classes of ``target``.

    A target is looked for in the manifests of ``hints``, then in all; one of whose box there is
    no shard is put together from shards that overlap it, which take its place in the classes.
    Targets without elements that are in none of the hints need nothing.
    """
    hinted = list(hints)
    exact = [d for d in hinted if not tensors.is_spoiled(d) and _is_exactly(tensors, d, target)]
    if exact and len(exact) == len(hinted):
        shards = tensors.contents[exact[0]].shards
        indices = tuple(range(len(shards)))
        columns = tuple(Column(d, tensors.holders_of(d, 0), indices) for d in sorted(exact))
        sizes = tuple(map(_NBYTES, shards))
        # Only where there are no bytes may there be no elements.
        empty = [] if all(sizes) else [is_empty(shard.box) for shard in shards]
        return Needs(_split_empty(columns, sizes, empty), [])
    return _Sorting(tensors, target, hinted).needs()


def _is_exactly(tensors: SaveTensors, digest: str, target: TargetSet) -> bool:
    """Whether the manifest has just the shards of ``target``, in the same order."""
    shards = tensors.contents[digest].shards
    if len(shards) != len(target) or not shards:
        return False
    if list(map(_BOX, shards)) != list(map(_BOX, target)):
        return False
    return tensors.paths(digest) == list(map(_LEAF, target))


def _split_empty(
    columns: tuple[Column, ...], nbytes: tuple[int, ...], empty: Sequence[bool]
) -> list[ShardClass]:
    """One class, or two when some shards are empty: those need not be fetched."""
    if not any(empty):
        return [ShardClass(columns, nbytes, sum(nbytes), False)]
    found: list[ShardClass] = []
    for wanted in (False, True):
        places = [place for place, is_so in enumerate(empty) if is_so == wanted]
        if places:
            chosen = tuple(
                Column(c.digest, c.holders, tuple(c.indices[place] for place in places))
                for c in columns
            )
            sizes = tuple(nbytes[place] for place in places)
            found.append(ShardClass(chosen, sizes, sum(sizes), wanted))
    return found


_Place = tuple[str, tuple[str, ...], int]
"""Digest, holders of the shard, its index there."""


class _Sorting:
    """Sorts the shards of one target set into classes, by who has them."""

    def __init__(self, tensors: SaveTensors, target: TargetSet, hints: Sequence[str]) -> None:
        self._tensors = tensors
        self._target = target
        self._hints = hints

    def needs(self) -> Needs:
        places: dict[ShardId, list[_Place]] = {}
        missing: list[ShardId] = []
        pieces: dict[ShardId, None] = {}
        for shard, found in zip(self._target, self._in_hints(), strict=True):
            if found:
                places[shard] = found
                continue
            places_anywhere = self._anywhere(shard)
            if places_anywhere:
                places[shard] = places_anywhere
                continue
            parts = self._tensors.pieces(shard)
            if parts is None:
                missing.append(shard)
            else:
                pieces.update(dict.fromkeys(parts))
        for shard in pieces:
            if shard not in places:
                places[shard] = self._anywhere(shard)
        return Needs(self._grouped(places), missing)

    def _in_hints(self) -> list[list[_Place]]:
        """For each target: where it is among the hinted manifests, by digest."""
        tensors, target = self._tensors, self._target
        number_of = dict(zip(_keys(map(_LEAF, target), target), range(len(target)), strict=True))
        found: list[list[_Place]] = [[] for _ in target]
        for digest in sorted(self._hints):
            shards = tensors.contents[digest].shards
            numbers = map(number_of.get, _keys(tensors.paths(digest), shards))
            spoiled = tensors.is_spoiled(digest)
            holders = tensors.holders_of(digest, 0) if shards and not spoiled else ()
            for index, number in enumerate(numbers):
                if number is None:
                    continue
                if spoiled:
                    holders = tensors.holders_of(digest, index)
                if holders:
                    found[number].append((digest, holders, index))
        return found

    def _anywhere(self, shard: ShardId) -> list[_Place]:
        holders_of = self._tensors.holders_of
        return [(d, holders_of(d, i), i) for d, i in self._tensors.copies(shard)]

    def _grouped(self, places: dict[ShardId, list[_Place]]) -> list[ShardClass]:
        groups: dict[tuple[bool, tuple[object, ...]], list[list[_Place]]] = {}
        for shard, found in places.items():
            names: list[object] = []
            for digest, holders, _ in found:
                names += (digest, id(holders))
            groups.setdefault((is_empty(shard.box), tuple(names)), []).append(found)
        classes: list[ShardClass] = []
        for (empty, _), members in groups.items():
            columns = tuple(
                Column(digest, holders, tuple(member[column][2] for member in members))
                for column, (digest, holders, _) in enumerate(members[0])
            )
            entries = self._tensors.contents[columns[0].digest].shards
            nbytes = tuple(entries[index].nbytes for index in columns[0].indices)
            classes.append(ShardClass(columns, nbytes, sum(nbytes), empty))
        # Those of few manifests first: what many have (a leaf replicated inside a slice) then
        # comes from a manifest that is needed anyway.
        classes.sort(key=lambda c: (len(c.columns), c.columns[0].digest, c.columns[0].indices))
        return classes


def _keys(
    paths: Iterable[str | None], shards: Iterable[object]
) -> Iterable[tuple[str | None, Box]]:
    return zip(paths, map(_BOX, shards), strict=True)
