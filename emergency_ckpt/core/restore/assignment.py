"""Assigns a source to every shard that a process needs, and balances the fetches over holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.plan_types import FetchGroup, LocalRead, TargetSet
from emergency_ckpt.core.restore.shard_classes import Needs, Part, ShardClass, classify
from emergency_ckpt.core.restore.shard_holders import OwnKey, SaveTensors
from emergency_ckpt.types import Box

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
        whole = len(indices) == len(tensors.contents[digest].shards)
        local[digest] = None if whole else tuple(sorted(indices))
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
        whole = len(together) == len(self._tensors.contents[digest].shards)
        return None if a is None or b is None or whole else tuple(together)


def _by_key(item: tuple[tuple[str, tuple[str, ...]], object]) -> tuple[str, tuple[str, ...]]:
    return item[0]


def _cycle(items: Sequence[_T], start: int, at_most: int) -> list[_T]:
    """Return up to ``at_most`` items in cyclic order from ``start``, without visiting the rest."""
    size = len(items)
    start %= size
    after = min(size, start + at_most)
    return [*items[start:after], *items[: min(start, at_most - (after - start))]]
