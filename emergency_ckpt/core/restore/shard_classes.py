"""Classes of shards that processes with equal needs get from the same holders.

Replicas publish equal manifests, so the shards that a process needs fall into few classes: one for
each manifest that its replicas have, and one for the shards that all of them have. Plans are made
of classes; single shards are processed only here, once for all processes with equal needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from emergency_ckpt.core.boxes import is_empty
from emergency_ckpt.core.restore.plan_types import TargetSet
from emergency_ckpt.core.restore.shard_holders import SaveTensors
from emergency_ckpt.types import Box, ShardId

_LEAF, _BOX, _NBYTES = attrgetter("leaf"), attrgetter("box"), attrgetter("nbytes")


_REMEMBERED = 64
"""Cached results that serve many groups of processes."""

Part = tuple[int, tuple[int, ...] | None]
"""Bytes, and shard indices of a manifest; None for all of them."""


class Column(NamedTuple):
    """A manifest that has every shard of a class, and the holders that have all of them intact.

    Attributes:
      indices: of the class's shards, among the ``shard_count`` of the manifest.
    """

    digest: str
    holders: tuple[str, ...]
    indices: tuple[int, ...]
    shard_count: int


@dataclass
class ShardClass:
    """Shards with the same holders.

    Attributes:
      columns: the manifests that have them, sorted by digest.
      nbytes: of each shard, in the order of every column's ``indices``.
      is_empty: the shards have no elements, so they need not be fetched.
    """

    columns: tuple[Column, ...]
    nbytes: tuple[int, ...]
    size_bytes: int
    is_empty: bool
    _parts: dict[tuple[int, int], list[Part]] = field(
        default_factory=dict[tuple[int, int], list[Part]]
    )

    def parts(self, column: int, count: int) -> list[Part]:
        """Return the class in up to ``count`` even parts, as shards of the column's manifest.

        The largest part first; the same for every column.
        """
        key = column, count
        found = self._parts.get(key)
        if found is None:
            indices, all_of_it = self.columns[column].indices, self.columns[column].shard_count
            found = self._parts[key] = [
                (size_bytes, None if len(places) == all_of_it else _chosen(indices, places))
                for size_bytes, places in _even(self.nbytes, count)
            ]
        return found


def _chosen(indices: tuple[int, ...], places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(map(indices.__getitem__, places)))


@lru_cache(maxsize=_REMEMBERED)
def _even(nbytes: tuple[int, ...], count: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Deal the indices out, largest shard first, each to the part with the fewest bytes.

    Returns (bytes, indices) of each part, the largest part first. Cached: the manifests of a large
    job differ in their boxes, seldom in their sizes.
    """
    if count == 1:
        return ((sum(nbytes), tuple(range(len(nbytes)))),)
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(place)
        loads[least] += nbytes[place]
    filled = [(load, tuple(part)) for load, part in zip(loads, parts, strict=True) if part]
    return tuple(sorted(filled, key=lambda part: -part[0]))


@dataclass
class Needs:
    """The classes of one target set, and the shards that no holder has."""

    classes: list[ShardClass]
    missing: list[ShardId]


def classify(tensors: SaveTensors, target: TargetSet, hints: Iterable[str]) -> Needs:
    """Return the classes of ``target``.

    A target is searched in the manifests of ``hints``, then in all. If no shard has its box, the
    shards that overlap it take its place in the classes. Targets without elements that are in none
    of the hints need nothing.
    """
    hinted = list(hints)
    exact = [d for d in hinted if not tensors.is_spoiled(d) and _is_exactly(tensors, d, target)]
    if exact and len(exact) == len(hinted):
        indices = tuple(range(len(tensors.contents[exact[0]].shards)))
        columns = tuple(
            Column(d, tensors.holders_of(d, 0), indices, len(indices)) for d in sorted(exact)
        )
        return Needs(_in_classes(tensors, columns), [])
    return _Sorting(tensors, target, hinted).needs()


def _is_exactly(tensors: SaveTensors, digest: str, target: TargetSet) -> bool:
    """Return whether the shards of the manifest are those of ``target``, in the same order."""
    shards = tensors.contents[digest].shards
    if len(shards) != len(target) or not shards:
        return False
    if list(map(_BOX, shards)) != list(map(_BOX, target)):
        return False
    return tensors.paths(digest) == tuple(map(_LEAF, target))


def _in_classes(tensors: SaveTensors, columns: tuple[Column, ...]) -> list[ShardClass]:
    """Return one class, or two when some shards are empty, which need not be fetched."""
    entries = tensors.contents[columns[0].digest].shards
    shards = tuple(map(entries.__getitem__, columns[0].indices))
    nbytes = tuple(map(_NBYTES, shards))
    # A shard without elements has no bytes.
    empty = [is_empty(shard.box) for shard in shards] if 0 in nbytes else []
    if not any(empty):
        return [ShardClass(columns, nbytes, sum(nbytes), False)]
    found: list[ShardClass] = []
    for wanted in (False, True):
        places = [place for place, is_so in enumerate(empty) if is_so == wanted]
        if places:
            chosen = tuple(
                Column(
                    c.digest, c.holders, tuple(map(c.indices.__getitem__, places)), c.shard_count
                )
                for c in columns
            )
            sizes = tuple(nbytes[place] for place in places)
            found.append(ShardClass(chosen, sizes, sum(sizes), wanted))
    return found


@dataclass(frozen=True)
class _Held:
    """Shards of one manifest with the same holders: their numbers, and their indices there."""

    digest: str
    holders: tuple[str, ...]
    index_of: dict[int, int] = field(default_factory=dict[int, int])


class _Sorting:
    """Sorts the shards of one target set into classes by their holders.

    A shard is identified by a number: its index in the target set, or one after those for a piece.
    """

    def __init__(self, tensors: SaveTensors, target: TargetSet, hints: Iterable[str]) -> None:
        self._tensors = tensors
        self._target = target
        self._paths = tuple(map(_LEAF, target))
        self._boxes = list(map(_BOX, target))
        self._held: dict[tuple[str, int], _Held] = {}
        for digest in sorted(hints):
            self._look_in(digest)

    @cached_property
    def _number_of(self) -> dict[tuple[str | None, Box], int]:
        return dict(zip(zip(self._paths, self._boxes, strict=True), count()))

    def needs(self) -> Needs:
        missing = list[ShardId]()
        found = set[int]().union(*(held.index_of for held in self._held.values()))
        pieces: dict[ShardId, None] = {}
        for number, shard in enumerate(self._target if len(found) < len(self._target) else ()):
            if number in found or self._look_anywhere(shard, number):
                continue
            parts = self._tensors.pieces(shard)
            if parts is None:
                missing.append(shard)
            else:
                pieces.update(dict.fromkeys(parts))
        for shard in pieces:
            # A piece that is a target too has been found already.
            if (shard.leaf, shard.box) not in self._number_of:
                number = self._number_of[shard.leaf, shard.box] = len(self._number_of)
                self._look_anywhere(shard, number)
        return Needs(self._classes(), missing)

    def _look_in(self, digest: str) -> None:
        index_of = self._index_of(digest)
        if not index_of:
            return
        if not self._tensors.is_spoiled(digest):
            holders = self._tensors.holders_of(digest, 0)
            self._held[digest, id(holders)] = _Held(digest, holders, index_of)
            return
        for number, index in index_of.items():
            self._note(digest, index, number)

    def _index_of(self, digest: str) -> dict[int, int]:
        """Return the index in the manifest of each of the target set's shards, by number."""
        paths = self._tensors.paths(digest)
        boxes = list(map(_BOX, self._tensors.contents[digest].shards))
        # Guessed from the leaves and then compared, so that not every box is hashed.
        likely = _in_order(self._paths, paths)
        if likely and boxes == list(map(self._boxes.__getitem__, likely)):
            return dict(zip(likely, count()))
        numbers = map(self._number_of.get, zip(paths, boxes, strict=True))
        return {number: index for index, number in enumerate(numbers) if number is not None}

    def _look_anywhere(self, shard: ShardId, number: int) -> bool:
        copies = self._tensors.copies(shard)
        for digest, index in copies:
            self._note(digest, index, number)
        return bool(copies)

    def _note(self, digest: str, index: int, number: int) -> None:
        holders = self._tensors.holders_of(digest, index)
        if holders:
            held = self._held.setdefault((digest, id(holders)), _Held(digest, holders))
            held.index_of[number] = index

    def _classes(self) -> list[ShardClass]:
        every = sorted(self._held.values(), key=lambda held: (held.digest, held.holders))
        groups = _groups(
            tuple((*held.index_of,) for held in every),
            tuple((*held.index_of.values(),) for held in every),
        )
        classes: list[ShardClass] = []
        for group in groups:
            columns = tuple(
                Column(
                    every[side].digest,
                    every[side].holders,
                    indices,
                    len(self._tensors.contents[every[side].digest].shards),
                )
                for side, indices in group
            )
            classes += _in_classes(self._tensors, columns)
        # Classes of few manifests first: shards that many manifests have (a leaf replicated inside
        # a slice) then come from a manifest that is needed anyway.
        classes.sort(key=lambda c: (len(c.columns), c.columns[0].digest, c.columns[0].indices))
        return classes


@lru_cache(maxsize=_REMEMBERED)
def _groups(
    numbers: tuple[tuple[int, ...], ...], indices: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Return the groups of shards that the same sides have: sides, and indices there, of each.

    Side i has shard ``numbers[i][j]`` at ``indices[i][j]``. Cached, as ``_in_order`` is.
    """
    groups: list[tuple[set[int], list[int]]] = []
    for side, held in enumerate(numbers):
        rest, divided = set(held), list[tuple[set[int], list[int]]]()
        for shards, sides in groups:
            both = shards & rest
            if both:
                rest -= both
                divided.append((both, [*sides, side]))
                shards = shards - both  # noqa: PLW2901  the remaining ones
            if shards:
                divided.append((shards, sides))
        if rest:
            divided.append((rest, [side]))
        groups = divided
    index_of = [dict(zip(*pair, strict=True)) for pair in zip(numbers, indices, strict=True)]
    return tuple(
        tuple((side, tuple(map(index_of[side].__getitem__, sorted(shards)))) for side in sides)
        for shards, sides in groups
    )


@lru_cache(maxsize=_REMEMBERED)
def _in_order(wanted: tuple[str, ...], held: tuple[str | None, ...]) -> tuple[int, ...]:
    """Return, for each held leaf, its index in ``wanted``, matching the n-th of equal leaves.

    Empty when a leaf has no such index. Cached: the manifests of a large job differ in their boxes,
    seldom in their leaves.
    """
    places: dict[str | None, deque[int]] = defaultdict(deque)
    for place, leaf in enumerate(wanted):
        places[leaf].append(place)
    if any(len(places[leaf]) < often for leaf, often in Counter(held).items()):
        return ()
    return tuple(places[leaf].popleft() for leaf in held)
