"""One process's part of a local plan: get every shard it needs into its own slots, verified."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import overlap, shape_of, volume
from emergency_ckpt.core.inventory import Quarantined
from emergency_ckpt.core.plan_types import FetchGroup, ProcessPlan, selected
from emergency_ckpt.errors import (
    CheckpointError,
    NotHeld,
    RamdiskFull,
    RestoreFailed,
    TransferError,
)
from emergency_ckpt.runtime.coordination import deadline_left_s
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.peers import fetch_contents
from emergency_ckpt.runtime.restore_types import Tally
from emergency_ckpt.tiers.dtypes import dtype_named
from emergency_ckpt.tiers.local import LocalTier, SlotWriter
from emergency_ckpt.tiers.manifest import Layout, build_contents, lay_out
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.holdings import FileTarget, ShardTarget, Target
from emergency_ckpt.types import Box, Contents, LeafSpec, SaveId, ShardEntry, ShardId

_MAX_SOURCES_AT_ONCE = 8


class CopiesFailed(RestoreFailed):
    """Copies that the plan counted on cannot be used; ``unusable`` names them."""

    def __init__(self, step: int, unusable: Iterable[Quarantined]) -> None:
        self.unusable = tuple(unusable)
        names = "; ".join(
            f"shard {q.shard} of {q.digest[:12]} at {q.holder}" for q in self.unusable[:4]
        )
        super().__init__("restore", f"step {step}", f"copies cannot be used: {names}")


class ShardCollection:
    """The shards of one save that this process holds after ``collect``, by shard identity."""

    def __init__(
        self,
        tier: LocalTier,
        client: TransferClient,
        events: EventSink,
        *,
        save: SaveId,
        me: str,
        deadline_s: float,
    ) -> None:
        self._tier = tier
        self._client = client
        self._events = events
        self._save = save
        self._me = me
        self._deadline_s = deadline_s
        self._located: dict[str, dict[Box, tuple[str, int]]] = {}
        self._leaves: dict[str, LeafSpec] = {}
        self.unusable: list[Quarantined] = []
        self.tally = Tally()

    def collect(self, plan: ProcessPlan) -> None:
        """Verify what is here, fetch what is not. Blocks; CopiesFailed when sources ran out."""
        own, lost = self._verify_own(plan)
        groups = [*plan.fetch, *lost]
        if not groups:
            for digest, shards in own:
                self._locate(digest, shards)
        else:
            self._gather_into_slot(own, groups, plan.addresses)

    def _verify_own(
        self, plan: ProcessPlan
    ) -> tuple[list[tuple[str, list[int]]], list[FetchGroup]]:
        """The plan's own shards that are intact, and groups to fetch for those that are not."""
        own: list[tuple[str, list[int]]] = []
        lost: list[FetchGroup] = []
        for read in plan.local:
            contents = self._own_contents(read.digest)
            wanted = list(selected(read.shards, contents))
            bad = dict(self._tier.verify(read.digest, wanted))
            for shard, actual in bad.items():
                expected = contents.shards[shard].crc32c
                detail = f"CRC32C {actual:08x}, expected {expected:08x}"
                self._tier.quarantine(read.digest, shard, detail)
                self._distrust(Quarantined(self._me, read.digest, shard), contents, detail)
            if bad and not read.alternates:
                raise CopiesFailed(self._save.step, self.unusable)
            if bad:
                lost.append(FetchGroup(read.digest, tuple(bad), read.alternates))
            own.append((read.digest, [shard for shard in wanted if shard not in bad]))
        return own, lost

    def _own_contents(self, digest: str) -> Contents:
        contents = self._tier.contents(digest)
        if contents is None:
            raise CopiesFailed(self._save.step, [Quarantined(self._me, digest)])
        return contents

    def _distrust(self, copy: Quarantined, contents: Contents | None, detail: str) -> None:
        self.unusable.append(copy)
        leaf = "" if contents is None or copy.shard is None else str(contents.shard_id(copy.shard))
        self._events.emit(
            "restore.quarantined",
            step=self._save.step,
            holder=copy.holder,
            shard=leaf,
            detail=detail,
        )

    def _locate(self, digest: str, shards: Iterable[int]) -> None:
        contents = self._own_contents(digest)
        self._leaves.update({leaf.path: leaf for leaf in contents.leaves})
        for shard in shards:
            self._put(contents.shard_id(shard), digest, shard)
            self.tally.local += contents.shards[shard].nbytes

    def _gather_into_slot(
        self,
        own: Sequence[tuple[str, list[int]]],
        groups: Sequence[FetchGroup],
        addresses: dict[str, str],
    ) -> None:
        """Copy and fetch everything into one free slot and publish it there.

        So this host holds all that its processes use again, and its old slots are free.
        """
        contents = {digest: self._own_contents(digest) for digest, _ in own}
        for group in groups:
            if group.digest not in contents:
                contents[group.digest] = self._contents_from(group, addresses)
        leaves = next(iter(contents.values())).leaves
        self._leaves = {leaf.path: leaf for leaf in leaves}
        layout = self._layout(leaves, contents, own, groups)
        places = {placed.shard: placed.offset for placed in layout.shards}
        writer = self._begin_write(layout.size_bytes)
        try:
            # First what comes over the network: the slot is still being reserved meanwhile.
            crcs = self._fetch_all(groups, contents, addresses, places, writer)
            crcs.update(self._copy_own(own, contents, places, writer))
            built = build_contents(
                self._save, leaves, layout, [crcs[placed.shard] for placed in layout.shards]
            )
            digest = writer.stage(built)
            writer.publish()
        except BaseException:
            writer.abort()
            raise
        for number, placed in enumerate(layout.shards):
            self._put(placed.shard, digest, number)

    def _put(self, shard: ShardId, digest: str, number: int) -> None:
        self._located.setdefault(shard.leaf, {})[shard.box] = (digest, number)

    def _begin_write(self, size_bytes: int) -> SlotWriter:
        """A slot that holds nothing this restore may still need, as long as the RAM suffices."""
        try:
            return self._tier.begin_write(self._save, size_bytes, allow_extra=True, sparse=True)
        except RamdiskFull:
            # Older steps go first: they are second choice, and peers have copies.
            self._tier.protect([self._save])
            return self._tier.begin_write(self._save, size_bytes, allow_extra=True)

    def _contents_from(self, group: FetchGroup, addresses: dict[str, str]) -> Contents:
        for source in group.sources:
            try:
                return fetch_contents(self._client, addresses[source], group.digest)
            except CheckpointError as error:
                self._distrust(Quarantined(source, group.digest), None, str(error))
        raise CopiesFailed(self._save.step, self.unusable)

    @staticmethod
    def _layout(
        leaves: Sequence[LeafSpec],
        contents: dict[str, Contents],
        own: Sequence[tuple[str, list[int]]],
        groups: Sequence[FetchGroup],
    ) -> Layout:
        sizes: dict[ShardId, int] = {}
        parts = [*own, *((g.digest, selected(g.shards, contents[g.digest])) for g in groups)]
        for digest, shards in parts:
            for shard in shards:
                sizes[contents[digest].shard_id(shard)] = contents[digest].shards[shard].nbytes
        return lay_out(leaves, sizes.items())

    def _copy_own(
        self,
        own: Sequence[tuple[str, list[int]]],
        contents: dict[str, Contents],
        places: dict[ShardId, int],
        writer: SlotWriter,
    ) -> dict[ShardId, int]:
        crcs: dict[ShardId, int] = {}
        for digest, shards in own:
            if not shards:
                continue
            ids = [contents[digest].shard_id(shard) for shard in shards]
            entries = [contents[digest].shards[shard] for shard in shards]
            with self._tier.mapping_for(digest) as (mapping, _):
                views = [mapping.view(entry.offset, entry.nbytes, None) for entry in entries]
                copied = writer.copy(list(zip(views, (places[i] for i in ids), strict=True)))
            for shard, shard_id, entry, crc in zip(shards, ids, entries, copied, strict=True):
                if crc != entry.crc32c:  # changed since it was verified, a moment ago
                    copy = Quarantined(self._me, digest, shard)
                    self._distrust(copy, contents[digest], f"CRC32C {crc:08x} when copied")
                    raise CopiesFailed(self._save.step, self.unusable)
                crcs[shard_id] = crc
                self.tally.local += entry.nbytes
        return crcs

    def _fetch_all(
        self,
        groups: Sequence[FetchGroup],
        contents: dict[str, Contents],
        addresses: dict[str, str],
        places: dict[ShardId, int],
        writer: SlotWriter,
    ) -> dict[ShardId, int]:
        def fetch(group: FetchGroup, into: Target) -> dict[ShardId, int]:
            return self._fetch_group(group, contents[group.digest], addresses, places, into)

        crcs: dict[ShardId, int] = {}
        if not groups:
            return crcs
        sources = min(_MAX_SOURCES_AT_ONCE, len(groups))
        with (
            writer.sparse_file() as file,
            ThreadPoolExecutor(sources, "eckpt-fetch") as pool,
        ):
            into = writer.mapping if file is None else FileTarget(*file)
            for fetched in pool.map(fetch, groups, repeat(into)):
                crcs.update(fetched)
        return crcs

    def _fetch_group(
        self,
        group: FetchGroup,
        contents: Contents,
        addresses: dict[str, str],
        places: dict[ShardId, int],
        into: Target,
    ) -> dict[ShardId, int]:
        """Fetch from the first source; what does not come or is damaged, from the alternates."""
        left = list(selected(group.shards, contents))
        crcs: dict[ShardId, int] = {}
        for source in group.sources:
            if not left:
                break
            entries = [contents.shards[shard] for shard in left]
            targets = [
                ShardTarget(shard, entry.nbytes, places[contents.shard_id(shard)])
                for shard, entry in zip(left, entries, strict=True)
            ]
            try:
                got = self._client.fetch_shards(
                    addresses[source],
                    group.digest,
                    targets,
                    into,
                    deadline_left_s(self._deadline_s),
                )
            except (TransferError, NotHeld) as error:
                _raise_if_full(error, self._save.step)
                self._distrust(Quarantined(source, group.digest), contents, str(error))
                continue
            left = self._accept(source, group.digest, contents, left, got, crcs)
        if left:
            raise CopiesFailed(self._save.step, self.unusable)
        return crcs

    def _accept(
        self,
        source: str,
        digest: str,
        contents: Contents,
        shards: Sequence[int],
        received: Sequence[int],
        crcs: dict[ShardId, int],
    ) -> list[int]:
        """Check what came against the CRCs of capture time; returns what must come again."""
        damaged: list[int] = []
        for shard, crc in zip(shards, received, strict=True):
            entry: ShardEntry = contents.shards[shard]
            if crc == entry.crc32c:
                crcs[contents.shard_id(shard)] = crc
                self.tally.peer += entry.nbytes
                continue
            damaged.append(shard)
            detail = f"CRC32C {crc:08x} as received, expected {entry.crc32c:08x}"
            self._distrust(Quarantined(source, digest, shard), contents, detail)
        return damaged

    def bytes_of(self, wanted: ShardId) -> npt.NDArray[np.uint8]:
        """Bytes of a wanted shard: lent from the slot, or put together when boxes differ."""
        held = self._located.get(wanted.leaf, {})
        if wanted.box in held:
            return self._tier.lend(*held[wanted.box])
        if volume(wanted.box) == 0:
            return np.empty(0, np.uint8)
        dtype = dtype_named(self._leaves[wanted.leaf].dtype)
        target = np.empty(shape_of(wanted.box), dtype)
        left = volume(wanted.box)
        for box, (digest, number) in held.items():
            common = overlap(box, wanted.box)
            if common is None or left == 0:
                continue
            source = self._tier.lend(digest, number).view(dtype).reshape(shape_of(box))
            target[_index(common.target)] = source[_index(common.source)]
            left -= volume(common.target)
        if left != 0:
            raise RestoreFailed(
                "restore", f"{wanted.leaf}{wanted.box}", f"{left} elements are held nowhere"
            )
        return target.reshape(-1).view(np.uint8)


def _raise_if_full(error: Exception, step: int) -> None:
    """A ramdisk that ran full while bytes came in is no fault of their source."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        raise RamdiskFull(
            "fetch", f"step {step}", str(cause), hint="enlarge the ramdisk"
        ) from error


def _index(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
