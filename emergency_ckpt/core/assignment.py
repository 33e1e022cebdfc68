"""Finds a copy of every shard that every process needs, and spreads the fetches over holders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from emergency_ckpt.core.boxes import BoxIndex, cover, describe, volume
from emergency_ckpt.core.plan_types import FetchGroup, LocalRead, TargetSet
from emergency_ckpt.types import Box, Contents, ShardId

MAX_SOURCES = 8
"""A process draws one manifest's shards from at most this many holders."""

MAX_WINDOW = 64
"""So many holders are compared by load when sources are chosen."""

MAX_ALTERNATES = 2
"""Other holders named for shards that a process has itself."""

_T = TypeVar("_T")

_Copy = tuple[str, int]
"""digest of a manifest, index of the shard in it"""

_OwnKey = tuple[tuple[str, frozenset[int]], ...]
"""What a process holds itself: digest and quarantined shards of each manifest, sorted."""


@dataclass(frozen=True)
class TensorPart:
    """The shards of one process: read here, fetched there."""

    local: tuple[LocalRead, ...] = ()
    fetch: tuple[FetchGroup, ...] = ()


@dataclass
class _Needs:
    """What a target set comes to for a process that holds certain manifests itself."""

    local: dict[str, tuple[int, ...] | None] = field(
        default_factory=dict[str, tuple[int, ...] | None]
    )
    remote: list[ShardId] = field(default_factory=list[ShardId])
    missing: list[ShardId] = field(default_factory=list[ShardId])


class SaveTensors:
    """Where the shards of one save are.

    Args:
      contents: usable manifests of the save, by digest.
      holders: names of the holders of each digest, in order of preference.
      spoiled: digest -> holder -> shards quarantined there.
    """

    def __init__(
        self,
        contents: Mapping[str, Contents],
        holders: Mapping[str, Sequence[str]],
        spoiled: Mapping[str, Mapping[str, frozenset[int]]],
    ) -> None:
        self.contents = contents
        self._holders = {digest: tuple(holders[digest]) for digest in sorted(contents)}
        self._spoiled = spoiled
        self._unspoiled: dict[_Copy, tuple[str, ...]] = {}
        self._places: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {}
        self._ids: dict[str, dict[ShardId, int]] = {}
        self._copies: dict[ShardId, list[_Copy]] | None = None
        self._boxes: dict[str, BoxIndex] = {}
        self._boxes_by_leaf: dict[str, list[Box]] = {}

    def ids(self, digest: str) -> dict[ShardId, int]:
        """Index of each shard of the manifest."""
        ids = self._ids.get(digest)
        if ids is None:
            contents = self.contents[digest]
            paths = [leaf.path for leaf in contents.leaves]
            ids = {
                ShardId(paths[entry.leaf], entry.box): index
                for index, entry in enumerate(contents.shards)
                if 0 <= entry.leaf < len(paths)
            }
            self._ids[digest] = ids
        return ids

    def holders_of(self, digest: str, index: int) -> tuple[str, ...]:
        """Holders with an intact copy of the shard; asked twice, the answer is one object."""
        holders = self._holders[digest]
        spoiled = self._spoiled.get(digest)
        if not spoiled:
            return holders
        found = self._unspoiled.get((digest, index))
        if found is None:
            bad = {holder for holder, shards in spoiled.items() if index in shards}
            found = tuple(h for h in holders if h not in bad) if bad else holders
            self._unspoiled[digest, index] = found
        return found

    def alternates(self, digest: str, own: str | None) -> tuple[str, ...]:
        """Holders of the whole manifest that follow ``own`` in cyclic order."""
        known = self._places.get(digest)
        if known is None:
            spoiled = self._spoiled.get(digest, {})
            whole = tuple(h for h in self._holders[digest] if h not in spoiled)
            known = self._places[digest] = (whole, {h: place for place, h in enumerate(whole)})
        holders, places = known
        after = places.get(own or "", -1) + 1
        count = min(MAX_ALTERNATES, len(holders) - (own in places))
        return tuple(holders[(after + i) % len(holders)] for i in range(count))

    def own_key(self, holder: str, digests: Iterable[str]) -> _OwnKey:
        """What ``holder`` can use of the manifests that it has."""
        return tuple(
            (digest, self._spoiled.get(digest, {}).get(holder, frozenset()))
            for digest in sorted(digests)
        )

    def digests_of_holders(self) -> dict[str, list[str]]:
        """Holder -> digests of its manifests."""
        digests: dict[str, list[str]] = {}
        for digest, holders in self._holders.items():
            for holder in holders:
                digests.setdefault(holder, []).append(digest)
        return digests

    def copies(self, shard: ShardId) -> list[_Copy]:
        """Every manifest that has the shard intact at some holder."""
        if self._copies is None:
            self._copies = self._index()
        return self._copies.get(shard, [])

    def pieces(self, target: ShardId) -> list[ShardId] | None:
        """Shards of other boxes that together hold the target; None when a part is missing."""
        if not volume(target.box):
            return []
        if self._copies is None:
            self._copies = self._index()
        index = self._boxes.get(target.leaf)
        if index is None:
            index = BoxIndex(self._boxes_by_leaf.get(target.leaf, ()))
            self._boxes[target.leaf] = index
        chosen, uncovered = cover(target.box, index.touching(target.box))
        return None if uncovered else [ShardId(target.leaf, box) for box in chosen]

    def _index(self) -> dict[ShardId, list[_Copy]]:
        copies: dict[ShardId, list[_Copy]] = {}
        for digest in self._holders:
            for shard, index in self.ids(digest).items():
                if self.holders_of(digest, index):
                    copies.setdefault(shard, []).append((digest, index))
        for shard in copies:
            self._boxes_by_leaf.setdefault(shard.leaf, []).append(shard.box)
        return copies


def assign(
    tensors: SaveTensors, targets: Mapping[int, TargetSet], own: Mapping[int, str]
) -> dict[int, TensorPart] | list[str]:
    """The part of each process, or one line for each leaf that is not whole.

    A target comes from the shard of its own box where one exists, from the process's own RAM if
    it is there; otherwise from shards that overlap it. Each remote shard goes to the holder that
    has to send the fewest bytes so far.

    Args:
      targets: what each process needs, by process index.
      own: name of the holder that a process is, by process index.
    """
    canonical = _shared_objects(targets)
    digests = tensors.digests_of_holders()
    needs_of: dict[tuple[int, _OwnKey], _Needs] = {}
    plans: dict[int, _Needs] = {}
    for process in sorted(targets):
        holder = own.get(process, "")
        key = tensors.own_key(holder, digests.get(holder, ()))
        target = canonical[process]
        needs = needs_of.get((id(target), key))
        if needs is None:
            needs = needs_of[id(target), key] = _needs(tensors, target, key)
        plans[process] = needs
    missing = _missing_lines(plans)
    if missing:
        return missing
    balance = _Balance(tensors)
    return {
        process: TensorPart(
            _local_reads(tensors, needs, own.get(process)),
            balance.fetch(process, needs.remote) if needs.remote else (),
        )
        for process, needs in plans.items()
    }


def _shared_objects(targets: Mapping[int, TargetSet]) -> dict[int, TargetSet]:
    """Equal target sets become one object; those that are one already are not compared."""
    by_identity: dict[int, TargetSet] = {}
    by_value: dict[TargetSet, TargetSet] = {}
    for target in targets.values():
        if id(target) not in by_identity:
            by_identity[id(target)] = by_value.setdefault(target, target)
    return {process: by_identity[id(target)] for process, target in targets.items()}


def _needs(tensors: SaveTensors, target: TargetSet, own: _OwnKey) -> _Needs:
    needs = _Needs()
    taken: dict[str, set[int]] = {digest: set() for digest, _ in own}
    sources: set[ShardId] = set()
    for shard in _take_own(tensors, target, own, taken):
        found = [shard] if tensors.copies(shard) else tensors.pieces(shard)
        if found is None:
            needs.missing.append(shard)
        else:
            sources.update(found)
    remote = [s for s in _take_own(tensors, sources, own, taken) if volume(s.box)]
    # Shards of few manifests first: a shard that many have (a leaf replicated inside a slice)
    # then comes from a manifest that is needed anyway.
    needs.remote = sorted(remote, key=lambda shard: (len(tensors.copies(shard)), shard))
    for digest, indices in taken.items():
        if indices:
            whole = len(indices) == len(tensors.contents[digest].shards)
            needs.local[digest] = None if whole else tuple(sorted(indices))
    return needs


def _take_own(
    tensors: SaveTensors,
    wanted: Iterable[ShardId],
    own: _OwnKey,
    taken: dict[str, set[int]],
) -> list[ShardId]:
    """Note in ``taken`` what the process has itself; return the rest."""
    rest = list(wanted)
    for digest, spoiled in own:
        ids, indices, left = tensors.ids(digest), taken[digest], list[ShardId]()
        for shard in rest:
            index = ids.get(shard)
            if index is None or index in spoiled:
                left.append(shard)
            else:
                indices.add(index)
        rest = left
    return rest


def _missing_lines(plans: Mapping[int, _Needs]) -> list[str]:
    """One line per leaf, with the boxes that no holder has intact."""
    lost: dict[str, set[Box]] = {}
    seen: set[int] = set()
    for needs in plans.values():
        if needs.missing and id(needs) not in seen:
            seen.add(id(needs))
            for shard in needs.missing:
                lost.setdefault(shard.leaf, set()).add(shard.box)
    lines: list[str] = []
    for leaf, boxes in sorted(lost.items()):
        order = sorted(boxes)
        more = f" and {len(order) - 3} more boxes" if len(order) > 3 else ""
        names = ", ".join(f"{leaf}{describe(box)}" for box in order[:3])
        lines.append(f"{names}{more}")
    return lines


def _local_reads(tensors: SaveTensors, needs: _Needs, own: str | None) -> tuple[LocalRead, ...]:
    return tuple(
        LocalRead(digest, shards, tensors.alternates(digest, own))
        for digest, shards in sorted(needs.local.items(), key=_by_digest)
    )


def _by_digest(item: tuple[str, object]) -> str:
    return item[0]


class _Balance:
    """Chooses sources so that no holder sends much more than another."""

    def __init__(self, tensors: SaveTensors) -> None:
        self._tensors = tensors
        self._bytes: dict[str, int] = {}

    def fetch(self, process: int, shards: Sequence[ShardId]) -> tuple[FetchGroup, ...]:
        """Fetch groups for shards that the process does not have, in the order of ``_Needs``."""
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        windows: dict[tuple[str, int], tuple[str, ...]] = {}
        used: dict[str, None] = {}
        tensors = self._tensors
        for shard in shards:
            digest, index = self._manifest(process, shard, used)
            used[digest] = None
            holders = tensors.holders_of(digest, index)
            window = windows.get((digest, id(holders)))
            if window is None:
                window = windows[digest, id(holders)] = self._window(process, holders)
            sources = window
            if len(window) > 1:
                first = window.index(min(window, key=self._load))
                sources = window[first:] + window[:first]
            nbytes = tensors.contents[digest].shards[index].nbytes
            self._bytes[sources[0]] = self._load(sources[0]) + nbytes
            groups.setdefault((digest, sources), []).append(index)
        return tuple(
            FetchGroup(digest, self._selection(digest, indices), sources)
            for (digest, sources), indices in sorted(groups.items())
        )

    def _load(self, holder: str) -> int:
        return self._bytes.get(holder, 0)

    def _manifest(self, process: int, shard: ShardId, used: Iterable[str]) -> _Copy:
        """A manifest to take the shard from: one in use already, or the least loaded of some."""
        copies = self._tensors.copies(shard)
        if len(copies) == 1:
            return copies[0]
        for digest in islice(used, MAX_SOURCES):
            index = self._tensors.ids(digest).get(shard)
            if index is not None and self._tensors.holders_of(digest, index):
                return digest, index
        some = _cycle(copies, process, MAX_SOURCES)
        return min(some, key=lambda copy: self._lowest_load(*copy))

    def _lowest_load(self, digest: str, index: int) -> int:
        holders = self._tensors.holders_of(digest, index)
        return min(map(self._load, holders[:MAX_SOURCES]))

    def _window(self, process: int, holders: tuple[str, ...]) -> tuple[str, ...]:
        """The holders to choose from for one process and manifest, least loaded first."""
        nearest = _cycle(holders, process, MAX_WINDOW)
        return tuple(sorted(nearest, key=self._load)[:MAX_SOURCES])

    def _selection(self, digest: str, indices: list[int]) -> tuple[int, ...] | None:
        whole = len(indices) == len(self._tensors.contents[digest].shards)
        return None if whole else tuple(sorted(indices))


def _cycle(items: Sequence[_T], start: int, at_most: int) -> list[_T]:
    """Up to ``at_most`` items in cyclic order from ``start``, without walking the others."""
    size = len(items)
    return [items[(start + offset) % size] for offset in range(min(size, at_most))]
