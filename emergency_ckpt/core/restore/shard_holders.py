"""The holders of one save's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from emergency_ckpt.core.boxes import BoxIndex, cover, intersect, is_empty, volume
from emergency_ckpt.types import Box, Contents, ShardId

MAX_ALTERNATES = 2
"""Maximum number of alternates for shards that a process has itself."""

_LEAF = attrgetter("leaf")

Copy = tuple[str, int]
"""Digest of a manifest, and index of the shard in it."""

OwnKey = tuple[tuple[str, frozenset[int]], ...]
"""Manifests that a process holds itself: digest and quarantined shards of each, sorted."""


class SaveTensors:
    """The holders of one save's shards.

    Args:
      contents: usable manifests of the save, by digest.
      holders: names of the holders of each digest, in order of preference.
      spoiled: digest -> holder -> shards quarantined there.
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
        self._unspoiled: dict[Copy, tuple[str, ...]] = {}
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

    def is_spoiled(self, digest: str) -> bool:
        """Return whether some shard of the manifest is quarantined at some holder."""
        return bool(self._damaged.get(digest))

    def holders_of(self, digest: str, index: int) -> tuple[str, ...]:
        """Return the holders with an intact copy of the shard, as one cached object."""
        holders = self._holders[digest]
        damaged = self._damaged.get(digest)
        if not damaged:
            return holders
        found = self._unspoiled.get((digest, index))
        if found is None:
            bad = {holder for holder, shards in damaged.items() if index in shards}
            found = tuple(h for h in holders if h not in bad) if bad else holders
            self._unspoiled[digest, index] = found
        return found

    def alternates(self, digest: str, own: str | None) -> tuple[str, ...]:
        """Return the holders of the complete manifest that follow ``own`` in cyclic order."""
        known = self._places.get(digest)
        if known is None:
            damaged = self._damaged.get(digest, {})
            whole = tuple(h for h in self._holders[digest] if h not in damaged)
            known = self._places[digest] = (whole, {h: place for place, h in enumerate(whole)})
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

        The first call builds an index over all shards of the job: see ``shard_classes``.
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
