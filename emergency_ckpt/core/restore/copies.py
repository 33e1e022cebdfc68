"""Finds the copies of every shard that a process needs. Pure.

1. ``locate`` answers for all processes. Processes with equal needs get one answer: which manifests
   have a shard, and who holds these manifests.
2. ``classify`` sorts the shards of one target set into bundles: shards that the same manifests
   have. Replicas publish equal manifests, so there are few bundles: one for each manifest of a
   process, and one for the shards that all manifests have.

No process is told what to read: ``part`` is how each process chooses among the copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from operator import attrgetter
from typing import TypeVar

import msgspec

from emergency_ckpt.core.boxes import BoxIndex, describe, divide, intersect, is_empty, volume
from emergency_ckpt.core.restore.plan_types import (
    Bundle,
    Copies,
    ManifestHolders,
    OwnManifest,
    TargetSet,
)
from emergency_ckpt.types import Box, Contents, ShardId

MAX_SOURCES = 8
"""At most so many manifests are named for a bundle, and so many holders for a manifest."""

MAX_HINTS = 64
"""Manifests of processes with equal needs that are searched before those of the whole job."""

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


def locate(
    tensors: SaveTensors, targets: Mapping[int, TargetSet], own: Mapping[int, str]
) -> dict[int, Copies] | list[str]:
    """Return the copies for each process, or one line for each leaf that no holders complete.

    Processes with equal needs have places that follow each other, so they begin at different
    holders.

    Args:
      targets: shards that each process needs, by process index.
      own: name of each process as a holder, by process index.
    """
    canonical = _shared_objects(targets)
    needs = {
        key: classify(tensors, target, hints)
        for key, (target, hints) in _hints(tensors, canonical, own).items()
    }
    missing = _missing_lines(needs.values())
    if missing:
        return missing
    key_of = {process: id(target) for process, target in canonical.items()}
    return spread(needs, key_of, lambda process: tensors.own_manifests(own.get(process, "")))


def spread(
    needs: Mapping[_Key, Needs],
    key_of: Mapping[int, _Key],
    own: Callable[[int], tuple[OwnManifest, ...]],
) -> dict[int, Copies]:
    """Return the copies for each process, which begins at its own place in the lists.

    Args:
      key_of: names the needs of each process.
      own: returns the manifests that a process has itself.
    """
    # The processes of equal needs begin one after the other, those of the next ones beside them.
    places = {key: number for number, key in enumerate(needs)}
    located: dict[int, Copies] = {}
    for process in sorted(key_of):
        key = key_of[process]
        place = places[key]
        located[process] = Copies(_nearest(needs[key], place), own(process), place)
        places[key] += 1
    return located


def _nearest(needs: Needs, place: int) -> tuple[Bundle, ...]:
    """Return the bundles with as many manifests and holders as may be named, from ``place`` on."""
    if needs.is_short:
        return needs.bundles
    named: dict[str, None] = {}
    bundles: list[Bundle] = []
    for bundle in needs.bundles:
        # A manifest that another bundle needs as well does not have to be fetched for this one.
        sources = [source for source in bundle.sources if source.digest in named][:MAX_SOURCES]
        others = [source for source in bundle.sources if source.digest not in named]
        sources += _cycle(others, place, MAX_SOURCES - len(sources)) if others else []
        named.update((source.digest, None) for source in sources)
        nearest: list[ManifestHolders] = []
        for source in sources:
            holders = source.holders
            if len(holders) > MAX_SOURCES:
                holders = tuple(_cycle(holders, place * MAX_SOURCES, MAX_SOURCES))
            nearest.append(ManifestHolders(source.digest, holders))
        bundles.append(msgspec.structs.replace(bundle, sources=tuple(nearest)))
    return tuple(bundles)


def _shared_objects(targets: Mapping[int, TargetSet]) -> dict[int, TargetSet]:
    """Return ``targets`` with one object for equal target sets; identical ones are not compared."""
    by_identity: dict[int, TargetSet] = {}
    by_ends: dict[object, list[TargetSet]] = {}
    for target in targets.values():
        if id(target) not in by_identity:
            # Unequal sets nearly always differ there, so not every shard is hashed.
            alike = by_ends.setdefault((len(target), target[:1], target[-1:]), [])
            same = next((other for other in alike if other == target), target)
            if same is target:
                alike.append(target)
            by_identity[id(target)] = same
    return {process: by_identity[id(target)] for process, target in targets.items()}


def _hints(
    tensors: SaveTensors, targets: Mapping[int, TargetSet], own: Mapping[int, str]
) -> dict[int, tuple[TargetSet, dict[str, None]]]:
    """Return each target set, and some manifests of the processes that need it, by identity."""
    digests = tensors.digests_of_holders
    hints: dict[int, tuple[TargetSet, dict[str, None]]] = {}
    for process in sorted(targets):
        target = targets[process]
        _, target_hints = hints.setdefault(id(target), (target, {}))
        for digest in digests.get(own.get(process, ""), ()):
            if len(target_hints) < MAX_HINTS and tensors.contents[digest].shards:
                target_hints[digest] = None
    return hints


def _missing_lines(needs: Iterable[Needs]) -> list[str]:
    """Return one line per leaf, with the boxes that no holder has intact."""
    lost: dict[str, set[Box]] = {}
    for process_needs in needs:
        for shard in process_needs.missing:
            lost.setdefault(shard.leaf, set()).add(shard.box)
    lines: list[str] = []
    for leaf, boxes in sorted(lost.items()):
        order = sorted(boxes)
        more = f" and {len(order) - 3} more boxes" if len(order) > 3 else ""
        names = ", ".join(f"{leaf}{describe(box)}" for box in order[:3])
        lines.append(f"{names}{more}")
    return lines


def _cycle(items: Sequence[_T], start: int, at_most: int) -> list[_T]:
    """Return up to ``at_most`` items in cyclic order from ``start``, without visiting the rest."""
    size = len(items)
    start %= size
    after = min(size, start + at_most)
    return [*items[start:after], *items[: min(start, at_most - (after - start))]]


_LEAF, _BOX = attrgetter("leaf"), attrgetter("box")


_REMEMBERED = 64
"""Cached results that serve many groups of processes."""


@dataclass(frozen=True)
class Needs:
    """The bundles of one target set, and the shards that no holder has.

    Bundles with few sources come first. A shard that many manifests have (a leaf replicated inside
    a slice) is then taken from a manifest that is needed anyway.
    """

    bundles: tuple[Bundle, ...]
    missing: tuple[ShardId, ...] = ()

    @cached_property
    def is_short(self) -> bool:
        """Return whether all sources may be named."""
        lists = [(bundle.sources, *(s.holders for s in bundle.sources)) for bundle in self.bundles]
        return all(len(items) <= MAX_SOURCES for several in lists for items in several)


def classify(tensors: SaveTensors, target: TargetSet, hints: Iterable[str]) -> Needs:
    """Return the bundles of ``target``.

    A target is searched in the manifests of ``hints``, then in all. If no shard has its box, the
    shards that overlap it take its place in the bundles. Targets without elements that are in none
    of the hints need nothing.
    """
    return _Sorting(tensors, target, sorted(hints)).needs()


@dataclass(frozen=True)
class _Held:
    """The shards of one manifest that the same holders have, by their numbers."""

    digest: str
    holders: tuple[str, ...]
    numbers: dict[int, None] = field(default_factory=dict[int, None])


class _Sorting:
    """Sorts the shards of one target set into bundles by their holders.

    A shard is identified by a number: its index in the target set, or one after those for a piece.
    """

    def __init__(self, tensors: SaveTensors, target: TargetSet, hints: Iterable[str]) -> None:
        self._tensors = tensors
        self._target = target
        self._pieces: list[ShardId] = []
        self._paths = tuple(map(_LEAF, target))
        self._boxes = list(map(_BOX, target))
        self._held: dict[tuple[str, int], _Held] = {}
        for digest in hints:
            self._look_in(digest)

    @cached_property
    def _number_of(self) -> dict[tuple[str | None, Box], int]:
        return dict(zip(zip(self._paths, self._boxes, strict=True), count()))

    def needs(self) -> Needs:
        missing = list[ShardId]()
        numbers = set[int]().union(*(source.numbers for source in self._held.values()))
        pieces: dict[ShardId, None] = {}
        for number, shard in enumerate(self._target if len(numbers) < len(self._target) else ()):
            if number in numbers or self._look_anywhere(shard, number):
                continue
            parts = self._tensors.pieces(shard)
            if parts is None:
                missing.append(shard)
            else:
                pieces.update(dict.fromkeys(parts))
        for shard in pieces:
            # A piece that is a target too has been found already.
            if (shard.leaf, shard.box) not in self._number_of:
                self._look_anywhere(shard, len(self._target) + len(self._pieces))
                self._pieces.append(shard)
        return Needs(tuple(self._bundles()), tuple(missing))

    def _look_in(self, digest: str) -> None:
        index_of = self._index_of(digest)
        if not index_of:
            return
        if not self._tensors.is_damaged(digest):
            holders = self._tensors.holders_of(digest, 0)
            numbers = dict.fromkeys(index_of)
            self._held[digest, id(holders)] = _Held(digest, holders, numbers)
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
            source = self._held.setdefault((digest, id(holders)), _Held(digest, holders))
            source.numbers[number] = None

    def _bundles(self) -> list[Bundle]:
        every = sorted(self._held.values(), key=lambda source: (source.digest, source.holders))
        most = len(self._target)
        bundles: list[Bundle] = []
        for sides, numbers in _groups(tuple((*source.numbers,) for source in every)):
            others = tuple(self._pieces[number - most] for number in numbers if number >= most)
            is_all = not others and len(numbers) == most
            places = None if is_all else tuple(number for number in numbers if number < most)
            sources = tuple(
                ManifestHolders(every[side].digest, every[side].holders) for side in sides
            )
            bundles.append(Bundle(places, others, sources))
        bundles.sort(
            key=lambda bundle: (len(bundle.sources), bundle.sources[0].digest, bundle.targets or ())
        )
        return bundles


@lru_cache(maxsize=_REMEMBERED)
def _groups(
    numbers: tuple[tuple[int, ...], ...],
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return the groups of shards that the same sides have: the sides and the shards of each.

    ``numbers``: the shards that each side has. Cached, as ``_in_order`` is.
    """
    groups: list[tuple[set[int], list[int]]] = []
    for side, side_numbers in enumerate(numbers):
        rest, divided = set(side_numbers), list[tuple[set[int], list[int]]]()
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
    return tuple((tuple(sides), tuple(sorted(shards))) for shards, sides in groups)


@lru_cache(maxsize=_REMEMBERED)
def _in_order(paths: tuple[str, ...], leaves: tuple[str | None, ...]) -> tuple[int, ...]:
    """Return the index of each of ``leaves`` in ``paths``, matching the n-th of equal leaves.

    The result is empty when a leaf has no such index. Cached: the manifests of a large job differ
    in their boxes, seldom in their leaves.
    """
    places: dict[str | None, deque[int]] = defaultdict(deque)
    for place, leaf in enumerate(paths):
        places[leaf].append(place)
    if any(len(places[leaf]) < often for leaf, often in Counter(leaves).items()):
        return ()
    return tuple(places[leaf].popleft() for leaf in leaves)


Copy = tuple[str, int]
"""Digest of a manifest, and index of the shard in it."""


class SaveTensors:
    """The holders of one save's shards.

    Args:
      contents: usable manifests of the save, by digest.
      holders: names of the holders of each digest, in order of preference.
      damaged: digest -> holder -> shards quarantined there.
    """

    def __init__(
        self,
        contents: Mapping[str, Contents],
        holders: Mapping[str, Sequence[str]],
        damaged: Mapping[str, Mapping[str, frozenset[int]]],
    ) -> None:
        self.contents = contents
        self._holders = {digest: tuple(holders[digest]) for digest in sorted(contents)}
        self._damaged = damaged
        self._intact: dict[Copy, tuple[str, ...]] = {}
        self._paths: dict[int, tuple[object, dict[int, str]]] = {}
        self._ids: dict[str, dict[ShardId, int]] = {}
        self._boxes: dict[str, BoxIndex] = {}

    def ids(self, digest: str) -> dict[ShardId, int]:
        """Return the index of each shard of the manifest."""
        ids = self._ids.get(digest)
        if ids is None:
            shards = self.contents[digest].shards
            ids = {
                ShardId(path, entry.box): index
                for index, (path, entry) in enumerate(zip(self.paths(digest), shards, strict=True))
                if path is not None
            }
            self._ids[digest] = ids
        return ids

    def paths(self, digest: str) -> tuple[str | None, ...]:
        """Return the leaf path of each shard of the manifest; None for an unknown leaf."""
        contents = self.contents[digest]
        leaves_paths = self._paths.get(id(contents.leaves))
        if leaves_paths is None:
            # The leaves are stored with their paths, so that no other object gets their id.
            paths = dict(enumerate(leaf.path for leaf in contents.leaves))
            leaves_paths = self._paths[id(contents.leaves)] = (contents.leaves, paths)
        return tuple(map(leaves_paths[1].get, map(_LEAF, contents.shards)))

    def is_damaged(self, digest: str) -> bool:
        """Return whether some shard of the manifest is quarantined at some holder."""
        return bool(self._damaged.get(digest))

    def holders_of(self, digest: str, index: int) -> tuple[str, ...]:
        """Return the holders with an intact copy of the shard, as one cached object."""
        holders = self._holders[digest]
        damaged = self._damaged.get(digest)
        if not damaged:
            return holders
        intact = self._intact.get((digest, index))
        if intact is None:
            bad = {holder for holder, shards in damaged.items() if index in shards}
            intact = tuple(h for h in holders if h not in bad) if bad else holders
            self._intact[digest, index] = intact
        return intact

    def own_manifests(self, holder: str) -> tuple[OwnManifest, ...]:
        """Return the manifests of ``holder`` with a shard that it can use itself."""
        manifests: list[OwnManifest] = []
        for digest in self.digests_of_holders.get(holder, ()):
            unusable = self._damaged.get(digest, {}).get(holder, frozenset[int]())
            if any(index not in unusable for index in range(len(self.contents[digest].shards))):
                manifests.append(OwnManifest(digest, tuple(sorted(unusable))))
        return tuple(manifests)

    @cached_property
    def digests_of_holders(self) -> Mapping[str, Sequence[str]]:
        """Return the digests of each holder's manifests, in order."""
        digests: dict[str, list[str]] = {}
        for digest, holders in self._holders.items():
            for holder in holders:
                digests.setdefault(holder, []).append(digest)
        return digests

    def copies(self, shard: ShardId) -> Sequence[Copy]:
        """Return the manifests of the whole job that have the shard intact at some holder.

        The first call builds an index over all shards of the job: one for all target sets.
        """
        return self._copies_by_shard.get(shard, ())

    def pieces(self, target: ShardId) -> list[ShardId] | None:
        """Return shards of other boxes that together hold the target; None when a part is missing.

        A save that was loaded from storage more than once, on other meshes, has overlapping shards.
        Those with the largest part of the target are chosen first, so that few bytes are fetched
        twice.
        """
        if is_empty(target.box):
            return []
        index = self._boxes.get(target.leaf)
        if index is None:
            index = BoxIndex(self._boxes_by_leaf.get(target.leaf, ()))
            self._boxes[target.leaf] = index
        touching = index.touching(target.box)
        if not index.is_disjoint:
            touching.sort(key=lambda box: (-_common_volume(box, target.box), box))
        portions, uncovered = divide(target.box, touching)
        if uncovered:
            return None
        boxes = dict.fromkeys(portion.source for portion in portions)
        return [ShardId(target.leaf, box) for box in boxes]

    @cached_property
    def _copies_by_shard(self) -> dict[ShardId, list[Copy]]:
        copies: dict[ShardId, list[Copy]] = {}
        for digest in self._holders:
            for shard, index in self.ids(digest).items():
                if self.holders_of(digest, index):
                    copies.setdefault(shard, []).append((digest, index))
        return copies

    @cached_property
    def _boxes_by_leaf(self) -> dict[str, list[Box]]:
        boxes: dict[str, list[Box]] = {}
        for shard in self._copies_by_shard:
            boxes.setdefault(shard.leaf, []).append(shard.box)
        return boxes


def _common_volume(a: Box, b: Box) -> int:
    common = intersect(a, b)
    return 0 if common is None else volume(common)
