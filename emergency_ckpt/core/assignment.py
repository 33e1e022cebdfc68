"""Finds a copy of every shard that every process needs, and spreads the fetches over holders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import islice
from typing import TypeVar

from emergency_ckpt.core.boxes import describe, is_empty
from emergency_ckpt.core.plan_types import FetchGroup, LocalRead, TargetSet
from emergency_ckpt.core.save_tensors import Copy, OwnKey, SaveTensors
from emergency_ckpt.types import Box, ShardId

MAX_SOURCES = 8
"""A process draws one manifest's shards from at most this many holders."""

MAX_WINDOW = 64
"""So many holders are compared by load when sources are chosen."""

_T = TypeVar("_T")


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
    remote: list[tuple[Copy, ...]] = field(default_factory=list[tuple[Copy, ...]])
    missing: list[ShardId] = field(default_factory=list[ShardId])


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
    hints = _hints(tensors, canonical, own, digests)
    needs_of: dict[tuple[int, OwnKey], _Needs] = {}
    plans: dict[int, _Needs] = {}
    for process in sorted(targets):
        holder = own.get(process)
        key = () if holder is None else tensors.own_key(holder, digests.get(holder, ()))
        target = canonical[process]
        needs = needs_of.get((id(target), key))
        if needs is None:
            needs = needs_of[id(target), key] = _needs(tensors, target, key, hints[id(target)])
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


def _hints(
    tensors: SaveTensors,
    targets: Mapping[int, TargetSet],
    own: Mapping[int, str],
    digests: Mapping[str, Sequence[str]],
) -> dict[int, dict[str, None]]:
    """By identity of the target set: some manifests of processes that need just these shards."""
    hints: dict[int, dict[str, None]] = {}
    for process in sorted(targets):
        known = hints.setdefault(id(targets[process]), {})
        holder = own.get(process)
        for digest in () if holder is None else digests.get(holder, ()):
            if len(known) < MAX_SOURCES and tensors.contents[digest].shards:
                known[digest] = None
    return hints


def _needs(tensors: SaveTensors, target: TargetSet, own: OwnKey, hints: Iterable[str]) -> _Needs:
    needs = _Needs()
    taken: dict[str, set[int]] = {digest: set() for digest, _ in own}
    remote: dict[ShardId, tuple[Copy, ...]] = {}
    pieces: dict[ShardId, None] = {}
    for shard in _take_own(tensors, target, own, taken):
        copies = tensors.copies(shard, hints)
        parts = None if copies else tensors.pieces(shard)
        if copies:
            remote[shard] = copies
        elif parts is None:
            needs.missing.append(shard)
        else:
            pieces.update(dict.fromkeys(parts))
    for shard in _take_own(tensors, pieces, own, taken):
        remote[shard] = tensors.copies(shard)
    # Shards of few manifests first: a shard that many have (a leaf replicated inside a slice)
    # then comes from a manifest that is needed anyway.
    order = sorted(remote, key=lambda shard: (len(remote[shard]), shard))
    needs.remote = [remote[shard] for shard in order if not is_empty(shard.box)]
    for digest, indices in taken.items():
        if indices:
            whole = len(indices) == len(tensors.contents[digest].shards)
            needs.local[digest] = None if whole else tuple(sorted(indices))
    return needs


def _take_own(
    tensors: SaveTensors,
    wanted: Iterable[ShardId],
    own: OwnKey,
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

    def fetch(self, process: int, shards: Sequence[tuple[Copy, ...]]) -> tuple[FetchGroup, ...]:
        """Fetch groups for shards, each given by its copies, that the process does not have."""
        bundles: dict[tuple[str, int], tuple[tuple[str, ...], list[int]]] = {}
        used: dict[str, None] = {}
        for copies in shards:
            digest, index = self._manifest(process, copies, used)
            used[digest] = None
            holders = self._tensors.holders_of(digest, index)
            bundle = bundles.get((digest, id(holders)))
            if bundle is None:
                bundle = bundles[digest, id(holders)] = (holders, [])
            bundle[1].append(index)
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for (digest, _), (holders, indices) in bundles.items():
            for sources, part in self._split(process, digest, holders, indices):
                groups.setdefault((digest, sources), []).extend(part)
        return tuple(
            FetchGroup(digest, self._selection(digest, indices), sources)
            for (digest, sources), indices in sorted(groups.items())
        )

    def _split(
        self, process: int, digest: str, holders: tuple[str, ...], indices: list[int]
    ) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        """Deal the shards out, the largest first, each to the least loaded holder."""
        entries = self._tensors.contents[digest].shards
        nbytes = {index: entries[index].nbytes for index in indices}
        window = self._window(process, holders)
        if len(window) == 1:
            self._bytes[window[0]] = self._load(window[0]) + sum(nbytes.values())
            yield window, indices
            return
        heap = [(self._load(name), place) for place, name in enumerate(window)]
        heapify(heap)
        dealt: list[list[int]] = [[] for _ in window]
        for index in sorted(indices, key=nbytes.__getitem__, reverse=True):
            load, place = heap[0]
            dealt[place].append(index)
            heapreplace(heap, (load + nbytes[index], place))
        for load, place in heap:
            self._bytes[window[place]] = load
            if dealt[place]:
                yield window[place:] + window[:place], dealt[place]

    def _load(self, holder: str) -> int:
        return self._bytes.get(holder, 0)

    def _manifest(self, process: int, copies: Sequence[Copy], used: Mapping[str, None]) -> Copy:
        """A manifest to take the shard from: one in use already, or the least loaded of some."""
        if len(copies) == 1:
            return copies[0]
        if used:
            for copy in islice(copies, MAX_WINDOW):
                if copy[0] in used:
                    return copy
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
