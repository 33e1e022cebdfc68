"""Assigns a source to every shard that a process needs, and balances the fetches. Pure.

1. ``classify`` sorts the shards of one target set into classes, those that the same manifests have.
   Replicas publish equal manifests, so they are few: one for each manifest that the replicas of a
   process have, and one for the shards that all of them have. Single shards are processed only
   there, once for all processes with equal needs.
2. ``_share`` takes from a process's own RAM what is intact there.
3. ``_Balance`` chooses the holders of the rest, so that none sends much more than another.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from operator import attrgetter
from typing import NamedTuple, TypeVar

from emergency_ckpt.core.boxes import BoxIndex, cover, describe, intersect, is_empty, volume
from emergency_ckpt.core.restore.plan_types import FetchGroup, LocalRead, TargetSet
from emergency_ckpt.types import Box, Contents, ShardId

MAX_SOURCES = 8
"""A process draws one manifest's shards from at most this many holders."""

MAX_HINTS = 64
"""Manifests of processes with equal needs that are searched before those of the whole job."""

MAX_WINDOW = 64
"""Maximum number of holders that are compared by load for one choice."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorPart:
    """The shards of one process: read from its own RAM, or fetched."""

    local: tuple[LocalRead, ...] = ()
    fetch: tuple[FetchGroup, ...] = ()


@dataclass(frozen=True)
class _Share:
    """The part of processes that need the same shards and hold the same manifests."""

    local: dict[str, tuple[int, ...] | None]
    remote: list[ShardClass]


def assign(
    tensors: SaveTensors, targets: Mapping[int, TargetSet], own: Mapping[int, str]
) -> dict[int, TensorPart] | list[str]:
    """Return the part of each process, or one line for each leaf that no holders complete.

    A target comes from the shard of its own box where one exists, from the process's own RAM if
    it is there; otherwise from shards that overlap it. Each remote shard goes to the holder that
    has to send the fewest bytes so far.

    Args:
      targets: shards that each process needs, by process index.
      own: name of each process as a holder, by process index.
    """
    canonical = _shared_objects(targets)
    digests = tensors.digests_of_holders()
    hints = _hints(tensors, canonical, own, digests)
    needs_of: dict[tuple[int, tuple[str, ...]], Needs] = {}
    shares: dict[tuple[int, OwnKey], _Share] = {}
    plans: dict[int, _Share] = {}
    for process in sorted(targets):
        holder = own.get(process)
        key = () if holder is None else tensors.own_key(holder, digests.get(holder, ()))
        target = canonical[process]
        share = shares.get((id(target), key))
        if share is None:
            known = hints[id(target)]
            others = tuple(digest for digest, _ in key if digest not in known)
            needs = needs_of.get((id(target), others))
            if needs is None:
                needs = classify(tensors, target, (*known, *others))
                needs_of[id(target), others] = needs
            share = shares[id(target), key] = _share(tensors, needs, key)
        plans[process] = share
    missing = _missing_lines(needs_of.values())
    if missing:
        return missing
    balance = _Balance(tensors)
    return {
        process: TensorPart(
            _local_reads(tensors, share, own.get(process)),
            balance.fetch(process, share.remote) if share.remote else (),
        )
        for process, share in plans.items()
    }


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
    tensors: SaveTensors,
    targets: Mapping[int, TargetSet],
    own: Mapping[int, str],
    digests: Mapping[str, Sequence[str]],
) -> dict[int, dict[str, None]]:
    """Return some manifests of processes with equal needs, by identity of the target set."""
    hints: dict[int, dict[str, None]] = {}
    for process in sorted(targets):
        known = hints.setdefault(id(targets[process]), {})
        holder = own.get(process)
        for digest in () if holder is None else digests.get(holder, ()):
            if len(known) < MAX_HINTS and tensors.contents[digest].shards:
                known[digest] = None
    return hints


def _share(tensors: SaveTensors, needs: Needs, own: OwnKey) -> _Share:
    """Return the needs that the process holds itself; the rest is remote."""
    taken: dict[str, list[int]] = {}
    remote: list[ShardClass] = []
    for each in needs.classes:
        for digest, damaged in own:
            column = next((c for c in each.columns if c.digest == digest), None)
            # All shards of a class are damaged at a holder, or none.
            if column is not None and column.indices[0] not in damaged:
                taken.setdefault(digest, []).extend(column.indices)
                break
        else:
            if not each.is_empty:
                remote.append(each)
    local: dict[str, tuple[int, ...] | None] = {}
    for digest, indices in taken.items():
        is_all = len(indices) == len(tensors.contents[digest].shards)
        local[digest] = None if is_all else tuple(sorted(indices))
    return _Share(local, remote)


def _missing_lines(needs: Iterable[Needs]) -> list[str]:
    """Return one line per leaf, with the boxes that no holder has intact."""
    lost: dict[str, set[Box]] = {}
    for each in needs:
        for shard in each.missing:
            lost.setdefault(shard.leaf, set()).add(shard.box)
    lines: list[str] = []
    for leaf, boxes in sorted(lost.items()):
        order = sorted(boxes)
        more = f" and {len(order) - 3} more boxes" if len(order) > 3 else ""
        names = ", ".join(f"{leaf}{describe(box)}" for box in order[:3])
        lines.append(f"{names}{more}")
    return lines


def _local_reads(tensors: SaveTensors, share: _Share, own: str | None) -> tuple[LocalRead, ...]:
    return tuple(
        LocalRead(digest, shards, tensors.alternates(digest, own))
        for digest, shards in sorted(share.local.items(), key=_by_digest)
    )


def _by_digest(item: tuple[str, object]) -> str:
    return item[0]


class _Balance:
    """Chooses sources so that no holder sends much more than another."""

    def __init__(self, tensors: SaveTensors) -> None:
        self._tensors = tensors
        self._bytes: defaultdict[str, int] = defaultdict(int)
        """Bytes that each holder has to send so far."""

    def fetch(self, process: int, classes: Sequence[ShardClass]) -> tuple[FetchGroup, ...]:
        """Return the fetch groups for the shards that the process does not have."""
        groups: dict[tuple[str, tuple[str, ...]], tuple[int, ...] | None] = {}
        drawn: defaultdict[str, int] = defaultdict(int)  # bytes from each manifest
        parts = max(1, MAX_SOURCES // len(classes))
        for each in classes:
            for digest, selection, sources in self._split(process, each, parts, drawn):
                before = groups.setdefault((digest, sources), selection)
                if before is not selection:
                    groups[digest, sources] = self._joined(digest, before, selection)
        return tuple(
            FetchGroup(digest, selection, sources)
            for (digest, sources), selection in sorted(groups.items(), key=_by_key)
        )

    def _split(
        self, process: int, each: ShardClass, parts: int, drawn: defaultdict[str, int]
    ) -> list[tuple[str, tuple[int, ...] | None, tuple[str, ...]]]:
        """Return manifest, shards and sources for each part of a class."""
        columns = self._columns(process, each, drawn)
        if len(columns) == 1:
            choices = self._of_one(process, each, parts, columns[0])
        else:
            choices = self._of_several(process, each, parts, columns)
        found: list[tuple[str, tuple[int, ...] | None, tuple[str, ...]]] = []
        for digest, (size_bytes, selection), sources in choices:
            self._bytes[sources[0]] += size_bytes
            drawn[digest] += size_bytes
            found.append((digest, selection, sources))
        return found

    def _of_one(
        self, process: int, each: ShardClass, parts: int, number: int
    ) -> list[tuple[str, Part, tuple[str, ...]]]:
        """Return up to ``parts`` parts of one manifest, and the sources of each."""
        column = each.columns[number]
        window = self._window(process, column.holders)
        return [
            (column.digest, part, window[place:] + window[:place])
            for place, part in enumerate(each.parts(number, min(parts, len(window))))
        ]

    def _of_several(
        self, process: int, each: ShardClass, parts: int, numbers: Iterable[int]
    ) -> list[tuple[str, Part, tuple[str, ...]]]:
        """Return up to ``parts`` parts, each from the manifest and sources with the least load."""
        windows = {n: self._window(process, each.columns[n].holders) for n in numbers}
        if parts == 1:
            number = min(windows, key=lambda n: self._bytes[windows[n][0]])
            return [(each.columns[number].digest, each.parts(number, 1)[0], windows[number])]
        loads = [
            (self._bytes[name], place, number)
            for number, window in windows.items()
            for place, name in enumerate(window)
        ]
        choices = sorted(loads)[:parts]
        found = len(each.parts(0, len(choices)))
        return [
            (
                each.columns[number].digest,
                each.parts(number, len(choices))[part],
                windows[number][place:] + windows[number][:place],
            )
            for part, (_, place, number) in enumerate(choices[:found])
        ]

    def _columns(self, process: int, each: ShardClass, drawn: Mapping[str, int]) -> Sequence[int]:
        """Return the numbers of the manifests that are considered, of those that have the class."""
        count = len(each.columns)
        if count == 1:
            return (0,)
        for number, column in enumerate(each.columns):
            # Too small for a source of its own: it is fetched with more of the same manifest.
            if 2 * each.size_bytes <= drawn.get(column.digest, 0):
                return (number,)
        return _cycle(range(count), process, MAX_SOURCES)

    def _window(self, process: int, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Return the holders to choose from for one process and manifest, least loaded first."""
        if len(holders) == 1:
            return holders
        nearest = _cycle(holders, process, MAX_WINDOW)
        return tuple(sorted(nearest, key=self._bytes.__getitem__)[:MAX_SOURCES])

    def _joined(
        self, digest: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        together = sorted({*(a or ()), *(b or ())})
        is_all = len(together) == len(self._tensors.contents[digest].shards)
        return None if a is None or b is None or is_all else tuple(together)


def _by_key(item: tuple[tuple[str, tuple[str, ...]], object]) -> tuple[str, tuple[str, ...]]:
    return item[0]


def _cycle(items: Sequence[_T], start: int, at_most: int) -> list[_T]:
    """Return up to ``at_most`` items in cyclic order from ``start``, without visiting the rest."""
    size = len(items)
    start %= size
    after = min(size, start + at_most)
    return [*items[start:after], *items[: min(start, at_most - (after - start))]]


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
    exact = [d for d in hinted if not tensors.is_damaged(d) and _is_exactly(tensors, d, target)]
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
        if not self._tensors.is_damaged(digest):
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


MAX_ALTERNATES = 2
"""Maximum number of alternates for shards that a process has itself."""

Copy = tuple[str, int]
"""Digest of a manifest, and index of the shard in it."""

OwnKey = tuple[tuple[str, frozenset[int]], ...]
"""Manifests that a process holds itself: digest and quarantined shards of each, sorted."""


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
        self._places: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {}
        self._paths: dict[int, tuple[object, dict[int, str]]] = {}
        self._ids: dict[str, dict[ShardId, int]] = {}
        self._copies: dict[ShardId, list[Copy]] | None = None
        self._boxes: dict[str, BoxIndex] = {}
        self._boxes_by_leaf: dict[str, list[Box]] = {}

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
        known = self._paths.get(id(contents.leaves))
        if known is None:
            # The leaves are stored with their paths, so that no other object gets their id.
            paths = dict(enumerate(leaf.path for leaf in contents.leaves))
            known = self._paths[id(contents.leaves)] = (contents.leaves, paths)
        return tuple(map(known[1].get, map(_LEAF, contents.shards)))

    def is_damaged(self, digest: str) -> bool:
        """Return whether some shard of the manifest is quarantined at some holder."""
        return bool(self._damaged.get(digest))

    def holders_of(self, digest: str, index: int) -> tuple[str, ...]:
        """Return the holders with an intact copy of the shard, as one cached object."""
        holders = self._holders[digest]
        damaged = self._damaged.get(digest)
        if not damaged:
            return holders
        found = self._intact.get((digest, index))
        if found is None:
            bad = {holder for holder, shards in damaged.items() if index in shards}
            found = tuple(h for h in holders if h not in bad) if bad else holders
            self._intact[digest, index] = found
        return found

    def alternates(self, digest: str, own: str | None) -> tuple[str, ...]:
        """Return the holders of the complete manifest that follow ``own`` in cyclic order."""
        known = self._places.get(digest)
        if known is None:
            damaged = self._damaged.get(digest, {})
            intact = tuple(h for h in self._holders[digest] if h not in damaged)
            known = self._places[digest] = (intact, {h: place for place, h in enumerate(intact)})
        holders, places = known
        after = -1 if own is None else places.get(own, -1)
        others = len(holders) - (after >= 0)
        return tuple(
            holders[(after + 1 + i) % len(holders)] for i in range(min(MAX_ALTERNATES, others))
        )

    def own_key(self, holder: str, digests: Iterable[str]) -> OwnKey:
        """Return the manifests of ``holder`` that it can use; those without shards are left out."""
        return tuple(
            (digest, self._damaged.get(digest, {}).get(holder, frozenset()))
            for digest in sorted(digests)
            if self.contents[digest].shards
        )

    def digests_of_holders(self) -> dict[str, list[str]]:
        """Return the digests of each holder's manifests."""
        digests: dict[str, list[str]] = {}
        for digest, holders in self._holders.items():
            for holder in holders:
                digests.setdefault(holder, []).append(digest)
        return digests

    def copies(self, shard: ShardId) -> Sequence[Copy]:
        """Return the manifests of the whole job that have the shard intact at some holder.

        The first call builds an index over all shards of the job: one for all target sets.
        """
        if self._copies is None:
            self._copies = self._index()
        return self._copies.get(shard, ())

    def pieces(self, target: ShardId) -> list[ShardId] | None:
        """Return shards of other boxes that together hold the target; None when a part is missing.

        A save that was loaded from storage more than once, on other meshes, has overlapping shards.
        Those with the largest part of the target are chosen first, so that few bytes are fetched
        twice.
        """
        if is_empty(target.box):
            return []
        if self._copies is None:
            self._copies = self._index()
        index = self._boxes.get(target.leaf)
        if index is None:
            index = BoxIndex(self._boxes_by_leaf.get(target.leaf, ()))
            self._boxes[target.leaf] = index
        touching = index.touching(target.box)
        if not index.is_disjoint:
            touching.sort(key=lambda box: (-_common_volume(box, target.box), box))
        chosen, uncovered = cover(target.box, touching)
        return None if uncovered else [ShardId(target.leaf, box) for box in chosen]

    def _index(self) -> dict[ShardId, list[Copy]]:
        copies: dict[ShardId, list[Copy]] = {}
        for digest in self._holders:
            for shard, index in self.ids(digest).items():
                if self.holders_of(digest, index):
                    copies.setdefault(shard, []).append((digest, index))
        for shard in copies:
            self._boxes_by_leaf.setdefault(shard.leaf, []).append(shard.box)
        return copies


def _common_volume(a: Box, b: Box) -> int:
    common = intersect(a, b)
    return 0 if common is None else volume(common)
