"""One process's part of a step in RAM: every shard that it needs, verified, in a slot of its own.

1. Own shards are verified where they are (``ShardCollection._verify_own``).
2. Missing and damaged shards are fetched, and each is checked as it comes (``ShardFetcher``). The
   process itself divides them over the holders (``core.restore.part``). All shards that this
   process keeps go into one slot. The others, and those for which there is no room, go into memory
   (``Scratch``). After a read from storage, shards go to the memory that has the part that was read
   (``LoadedPart``). A fetch in which nothing moves for ``transfer_timeout_s`` ends, and another
   holder is asked for the rest.
3. A shard goes to the devices as soon as it is checked (``Arrivals``, ``bytes_of``), from where
   it is. Its bytes are not overwritten before the restore is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt import _native
from emergency_ckpt.cluster.coordination import deadline_left_s
from emergency_ckpt.cluster.peers import fetch_contents
from emergency_ckpt.cluster.shard_source import LoadedPart, Scratch
from emergency_ckpt.core.boxes import describe, divide, relative, shape_of, slices, volume
from emergency_ckpt.core.placement import RetainedShards
from emergency_ckpt.core.restore.inventory import Quarantined
from emergency_ckpt.core.restore.part import (
    fetch_groups,
    fullest_first,
    has_shards,
    missing_shards,
    own_shards,
    same_shards,
)
from emergency_ckpt.core.restore.plan_types import (
    Copies,
    FetchGroup,
    ManifestHolders,
    TargetSet,
    digests_by_holder,
)
from emergency_ckpt.core.shard_layout import Layout, lay_out
from emergency_ckpt.errors import CheckpointError, CorruptData, NotHeld, RamdiskFull, RestoreFailed
from emergency_ckpt.ram.manifest import build_contents
from emergency_ckpt.ram.tier import LocalTier, SlotWriter
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.request import Tally
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import Box, Contents, LeafSpec, SaveId, ShardId
from emergency_ckpt.work_progress import WorkProgress

_View = Callable[[], npt.NDArray[np.uint8]]

_MAX_SOURCES_AT_ONCE = 8

_GRACE_S = 5.0
"""Added to the time of the calls to holders, whose own errors are more precise."""

_VERIFY_BYTES = 256 << 20
"""Bytes of own shards that are checked at once: enough that checking in parts costs nothing."""


class Arrivals:
    """A queue from the threads that fetch and check shards to the thread that uses them."""

    def __init__(self, progress: WorkProgress) -> None:
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: list[ShardId] = []
        self._ended = False

    def put(self, *shards: ShardId) -> None:
        """Note that ``shards`` can be used from now on. From any thread."""
        with self._changed:
            self._waiting.extend(shards)
            self._changed.notify_all()

    def end(self) -> None:
        """Note that no more shards will come: all are here, or there was a failure."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[list[ShardId]]:
        """Yield the shards that arrived since the last time. Waits; DeadlineExceeded."""
        while True:
            with self._changed:
                while not self._changed.wait_for(
                    lambda: self._waiting or self._ended, self._progress.left_s + _GRACE_S
                ):
                    if time.monotonic() >= self._progress.deadline_s + _GRACE_S:
                        problem = "they did not come in time"
                        raise self._progress.error("restore", "shards", problem)
                arrived, self._waiting = self._waiting, []
            if not arrived:
                return
            yield arrived


class HeldShards:
    """The shards of one save that are in host memory, and their leaves."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._views: dict[str, dict[Box, _View]] = {}
        self._leaves: dict[str, LeafSpec] = {}

    def know(self, leaves: Iterable[LeafSpec]) -> None:
        """Note leaves as saved."""
        self._leaves.update({leaf.path: leaf for leaf in leaves})

    def put(self, shard: ShardId, view: _View) -> bool:
        """Note where a shard can be used; return whether that was news. From several threads."""
        is_news = self._views.setdefault(shard.leaf, {}).setdefault(shard.box, view) is view
        if is_news:
            self._arrivals.put(shard)
        return is_news

    def dtype_of(self, path: str) -> str:
        """Return the dtype in which a leaf was saved."""
        return self._leaves[path].dtype

    def bytes_of(self, shard: ShardId) -> npt.NDArray[np.uint8]:
        """Return the bytes of a shard: in place, or combined from parts where boxes differ."""
        views = self._views.get(shard.leaf, {})
        if shard.box in views:
            return views[shard.box]()
        if volume(shard.box) == 0:
            return np.empty(0, np.uint8)
        dtype = dtype_named(self._leaves[shard.leaf].dtype)
        # Boxes of one save may overlap: see ``boxes.divide``.
        portions, missing = divide(shard.box, tuple(views))
        if missing:
            raise RestoreFailed(
                "restore",
                f"{shard.leaf}{describe(shard.box)}",
                f"{', '.join(map(describe, missing[:4]))} is held nowhere"
                f" ({sum(map(volume, missing))} elements)",
            )
        target = np.empty(shape_of(shard.box), dtype)
        for source, parts in groupby(portions, key=attrgetter("source")):
            array = views[source]().view(dtype).reshape(shape_of(source))
            for portion in parts:
                into, out_of = relative(portion.part, shard.box), relative(portion.part, source)
                target[slices(into)] = array[slices(out_of)]
        return target.reshape(-1).view(np.uint8)


class ShardCollection:
    """The shards of one save that this process needs, by shard identity, as they become usable.

    Attributes:
      gathered: digest of the slot that alone has all shards that this process keeps; None when
        several slots have them, none of them stays, or there is no room for them.
      held: where the shards are.
      tally: the bytes so far, by where they came from.
    """

    def __init__(
        self,
        tier: LocalTier,
        *,
        save: SaveId,
        me: str,
        targets: TargetSet,
        retained: RetainedShards | None,
        calls: HolderCalls,
        room: RestoreRoom,
        addresses: Mapping[str, str],
        loaded: LoadedPart | None = None,
        expendable: Collection[SaveId] = (),
    ) -> None:
        """``targets``: the shards that this process needs. ``expendable``: as in ``RestoreRoom``.

        ``addresses``: of the holders, by name. ``loaded``: the part of the save that was read from
        storage. ``retained``: the shards that stay in this process's RAM; None: all ``targets``.
        """
        self._tier = tier
        self._room = room
        self._fetcher = ShardFetcher(calls, addresses, save=save)
        self.tally = self._fetcher.tally
        self._save = save
        self._me = me
        self._targets = targets
        self._retained = retained
        self._loaded = loaded
        self._expendable = expendable
        self.gathered: str | None = None
        self._arrivals = Arrivals(calls.progress)
        self.held = HeldShards(self._arrivals)
        self._contents: dict[str, Contents] = {}  # by digest: own manifests, and others in use
        self._readings = ExitStack()
        self._readers: dict[str, Callable[[int], npt.NDArray[np.uint8]]] = {}
        self._progress = calls.progress

    @contextmanager
    def collecting(self, copies: Copies) -> Generator[Iterable[Sequence[ShardId]]]:
        """While inside, a thread of its own verifies own shards and fetches missing ones.

        Gives an iterable of the shards whose boxes are as in the save, as they become usable: from
        then on ``held`` has them, until the exit. When the iterable ends, ``held`` has all other
        shards too. The exit blocks until nothing is written any more. The iterable or the exit
        raises CopiesFailed when no sources are left, or HolderUnreachable.
        """

        def collect() -> None:
            try:
                self._collect(copies)
            finally:
                self._arrivals.end()

        with self._readings, ThreadPoolExecutor(1, "eckpt-collect") as pool:
            collected = pool.submit(collect)

            def arrivals() -> Generator[Sequence[ShardId]]:
                yield from self._arrivals
                collected.result()

            try:
                yield arrivals()
            except Exception as error:
                # Where a slot was given up, its use fails too: raise the error behind that.
                if (cause := collected.exception()) is not None:
                    raise cause from error
                raise
            collected.result()

    def _collect(self, copies: Copies) -> None:
        """Verify own shards, choose holders of the missing ones, and receive these."""
        loaded = self._loaded
        if loaded is not None:
            self._readings.enter_context(loaded.transfer())
            # The part read from storage is used first, or last once a slot has all of it.
            in_order = sorted(
                copies.own, key=lambda own: (own.digest == loaded.digest) != loaded.is_open
            )
            copies = msgspec.structs.replace(copies, own=tuple(in_order))
        for manifest in copies.own:
            self._contents[manifest.digest] = self._own_contents(manifest.digest)
        if loaded is None and len(copies.own) > 1:
            copies = fullest_first(copies, self._targets, self._contents, self._retained)
        own = own_shards(copies, self._targets, self._contents)
        present: set[ShardId] = set()
        for group in own:
            contents = self._contents[group.digest]
            self.held.know(contents.leaves)
            present.update(map(contents.shard_id, group.shards))
        missing = missing_shards(copies, self._targets, present)
        self._progress.begin("shards", self._size_bytes(own))
        own, damaged = self._verify_own(own, in_place=not missing)
        lost = {*missing, *damaged}
        groups: list[FetchGroup] = []
        if lost:
            groups = fetch_groups(copies, self._targets, lost, self._me, self._contents_from)
        if sum(len(group.shards) for group in groups) < len(lost):
            raise CopiesFailed(self._save.step, self._fetcher.unusable)
        self._progress.expect(self._size_bytes(groups))
        self._receive(own, groups)

    def _contents_from(
        self, sources: Sequence[ManifestHolders], shards: Collection[ShardId]
    ) -> tuple[str, Contents]:
        """Return the digest and the manifest of a source: one at hand, or the first to come."""
        for source in sources:
            at_hand = self._contents.get(source.digest)
            if at_hand is not None and has_shards(at_hand, shards):
                return source.digest, at_hand
        digest, contents = self._fetcher.contents_from(sources, shards)
        self._contents[digest] = contents
        self.held.know(contents.leaves)
        return digest, contents

    def _verify_own(
        self, groups: Sequence[FetchGroup], *, in_place: bool
    ) -> tuple[list[FetchGroup], list[ShardId]]:
        """Return the own shards that are intact, and those that are not.

        With ``in_place`` the intact shards can be used at once, where they are.
        """
        own: list[FetchGroup] = []
        lost: list[ShardId] = []
        for group in groups:
            digest, of = group.digest, self._contents[group.digest]
            intact: list[int] = []
            for batch in _batches(group.shards, of):
                loaded = self._loaded_as(digest)
                with self._own_copy(digest):
                    damaged = (
                        self._tier.verify(digest, batch) if loaded is None else loaded.verify(batch)
                    )
                bad = dict(damaged)
                self._progress.add(sum(of.shards[shard].nbytes for shard in batch))
                good = [shard for shard in batch if shard not in bad]
                intact += good
                if in_place:
                    self._locate(digest, good)
                for shard, actual in bad.items():
                    detail = f"CRC32C {actual:08x}, expected {of.shards[shard].crc32c:08x}"
                    self._tier.quarantine(digest, shard, detail)
                    self._fetcher.mark_failed(Quarantined(self._me, digest, shard), of, detail)
                    lost.append(of.shard_id(shard))
            own.append(FetchGroup(digest, tuple(intact), ()))
        return own, lost

    @contextmanager
    def _own_copy(self, digest: str) -> Generator[None]:
        """Raise CopiesFailed where this process's own copy cannot be read any more."""
        try:
            yield
        except NotHeld as error:
            copy = Quarantined(self._me, digest)
            self._fetcher.mark_failed(copy, None, str(error))
            raise CopiesFailed(self._save.step, self._fetcher.unusable) from error

    def _own_contents(self, digest: str) -> Contents:
        """Return a manifest of this process. CopiesFailed when it is not here any more."""
        loaded = self._loaded_as(digest)
        contents = self._tier.contents(digest) if loaded is None else loaded.contents
        if contents is None:
            raise CopiesFailed(self._save.step, [Quarantined(self._me, digest)])
        return contents

    def _loaded_as(self, digest: str) -> LoadedPart | None:
        """Return the part read from storage, if ``digest`` is its digest."""
        loaded = self._loaded
        return None if loaded is None or loaded.digest != digest else loaded

    def _locate(self, digest: str, shards: Sequence[int]) -> None:
        """Note own shards where they are."""
        if not shards:
            return
        contents, loaded = self._own_contents(digest), self._loaded_as(digest)
        if loaded is not None:
            self._readers[digest] = loaded.view
        elif digest not in self._readers:
            with self._own_copy(digest):
                self._readers[digest] = self._readings.enter_context(self._tier.reading(digest))
        for shard in shards:
            view = partial(self._readers[digest], shard)
            if self.held.put(contents.shard_id(shard), view):
                self.tally.local += contents.shards[shard].nbytes

    def _receive(self, own: Sequence[FetchGroup], groups: Sequence[FetchGroup]) -> None:
        """Fetch all missing shards to where they are used, beside the intact own shards."""
        loaded = self._loaded
        for group in own:
            if self._loaded_as(group.digest):
                self._locate(group.digest, group.shards)
        own = [group for group in own if not self._loaded_as(group.digest)]
        if loaded is not None and loaded.is_open:
            places = {placed.shard for placed in loaded.layout.shards}
            into, used = self._divide(groups, places)
            own_into, own = self._divide(own, places)
            self._complete(loaded, own_into, into)
        elif loaded is not None and loaded.published is not None:
            used = groups  # an attempt before this one has published all that stays
            if all(copy.digest != loaded.digest for copy in self._fetcher.unusable):
                self.gathered = loaded.published
        else:
            into, used = self._divide(groups, self._retained)
            if into:
                # The kept shards go into one slot, so that the old slots are free.
                own_into, own_used = self._divide(own, self._retained)
                if self._gather_into_slot(own_into, into):
                    own = own_used
                else:
                    used = [*into, *used]
            else:
                self.gathered = self._whole_slot(own)
        for group in own:
            self._locate(group.digest, group.shards)
        if used:
            layout = self._lay_out(used)
            self._fill(Scratch(layout.size_bytes), layout, (), used)

    def _whole_slot(self, own: Sequence[FetchGroup]) -> str | None:
        """Return the digest of the own slot that has all kept shards, of those in ``own``."""
        groups, _ = self._divide(own, self._retained)
        filled = [group.digest for group in groups if group.shards]
        return filled[0] if len(filled) == 1 else None

    def _gather_into_slot(self, own: Sequence[FetchGroup], groups: Sequence[FetchGroup]) -> bool:
        """Copy and fetch all kept shards into one free slot, and publish the slot.

        So this host again has all shards that it keeps, and its old slots are free. If there is no
        room for a slot, do nothing and return False.
        """
        layout = self._lay_out([*own, *groups])
        writer = self._room.begin_write(
            self._save, layout, expendable=self._expendable, sources=[self._save]
        )
        if writer is None:
            return False
        with writer:
            # The bytes are read from this slot to the end, also after the slot is published.
            self._readings.callback(writer.pin().end)
            self._readings.enter_context(writer.mapped.transfer())
            crcs = self._fill(writer, layout, own, groups)
            self._publish(writer, layout, crcs, next(iter(self._contents.values())).leaves)
        return True

    def _complete(
        self, loaded: LoadedPart, own: Sequence[FetchGroup], groups: Sequence[FetchGroup]
    ) -> None:
        """Copy and fetch the other shards to the part read from storage; publish what stays.

        There is no publication without a slot. After a failure the part is as it was, and peers
        fetch from it as before.
        """
        of, memory, layout = loaded.contents, loaded.memory, loaded.layout
        crcs = {of.shard_id(index): entry.crc32c for index, entry in enumerate(of.shards)}
        crcs.update(self._fill(memory, layout, own, groups))
        if isinstance(memory, SlotWriter) and not self._room.lack:
            loaded.is_open = not self._publish(memory, layout, crcs, of.leaves)
            loaded.published = self.gathered

    def _fill(
        self,
        memory: SlotWriter | Scratch,
        layout: Layout,
        own: Sequence[FetchGroup],
        groups: Sequence[FetchGroup],
    ) -> dict[ShardId, int]:
        """Fetch into ``memory``, and copy own shards if it is a slot; return the CRC32Cs there."""
        places = {placed.shard: placed for placed in layout.shards}
        offsets = {placed.shard: placed.offset for placed in layout.shards}

        def put(shard: ShardId) -> bool:
            placed = places[shard]
            return self.held.put(shard, partial(memory.view, placed.offset, placed.nbytes))

        crcs = self._fetcher.fetch_all(groups, self._contents, offsets, memory.mapping, put)
        if isinstance(memory, SlotWriter):
            crcs.update(self._copy_own(own, offsets, memory, put))
        else:
            for group in own:
                self._locate(group.digest, group.shards)
        return crcs

    def _copy_own(
        self,
        own: Sequence[FetchGroup],
        offsets: Mapping[ShardId, int],
        writer: SlotWriter,
        put: Callable[[ShardId], bool],
    ) -> dict[ShardId, int]:
        """Copy own shards to ``offsets`` of a slot; return the CRC32C of each. CopiesFailed."""
        crcs: dict[ShardId, int] = {}
        for group in own:
            of = self._contents[group.digest]
            for batch in _batches(group.shards, of):
                ids = [of.shard_id(shard) for shard in batch]
                entries = [of.shards[shard] for shard in batch]
                with (
                    self._own_copy(group.digest),
                    self._tier.mapping_for(group.digest) as (mapping, _),
                ):
                    views = [mapping.view(entry.offset, entry.nbytes, None) for entry in entries]
                    copied = writer.copy(list(zip(views, (offsets[i] for i in ids), strict=True)))
                self._progress.touch()
                for shard, shard_id, entry, crc in zip(batch, ids, entries, copied, strict=True):
                    if crc != entry.crc32c:  # changed since it was verified, a moment ago
                        copy = Quarantined(self._me, group.digest, shard)
                        self._fetcher.mark_failed(copy, of, f"CRC32C {crc:08x} when copied")
                        raise CopiesFailed(self._save.step, self._fetcher.unusable)
                    crcs[shard_id] = crc
                    if put(shard_id):
                        self.tally.local += entry.nbytes
        return crcs

    def _publish(
        self,
        writer: SlotWriter,
        layout: Layout,
        crcs: Mapping[ShardId, int],
        leaves: Sequence[LeafSpec],
    ) -> bool:
        """Publish the shards that stay in RAM; return False where the manifest has no room."""
        stays = [
            placed
            for placed in layout.shards
            if placed.shard in crcs and (self._retained is None or placed.shard in self._retained)
        ]
        part = Layout(tuple(stays), layout.size_bytes)
        built = build_contents(self._save, leaves, part, [crcs[placed.shard] for placed in stays])
        try:
            digest = writer.stage(built)
            writer.publish()
        except RamdiskFull as error:
            self._room.note_full(str(error))
            return False
        self.gathered = digest
        return True

    def _divide(
        self, groups: Sequence[FetchGroup], first: Container[ShardId] | RetainedShards | None
    ) -> tuple[list[FetchGroup], list[FetchGroup]]:
        """Divide groups into shards that are in ``first``, and the others. None: all are in."""
        if first is None:
            return list(groups), []
        inside: list[FetchGroup] = []
        outside: list[FetchGroup] = []
        for group in groups:
            of = self._contents[group.digest]
            for is_inside, into in ((True, inside), (False, outside)):
                shards = [i for i in group.shards if (of.shard_id(i) in first) == is_inside]
                if shards:
                    into.append(msgspec.structs.replace(group, shards=tuple(shards)))
        return inside, outside

    def _lay_out(self, groups: Iterable[FetchGroup]) -> Layout:
        sizes: dict[ShardId, int] = {}
        for group in groups:
            of = self._contents[group.digest]
            sizes.update((of.shard_id(index), of.shards[index].nbytes) for index in group.shards)
        return lay_out(next(iter(self._contents.values())).leaves, sizes.items())

    def _size_bytes(self, groups: Iterable[FetchGroup]) -> int:
        return sum(
            self._contents[group.digest].shards[shard].nbytes
            for group in groups
            for shard in group.shards
        )


def _batches(shards: Sequence[int], contents: Contents) -> Generator[list[int]]:
    """Yield the shards in their order, in batches of so many bytes; no batch is empty."""
    batch: list[int] = []
    nbytes = 0
    for shard in shards:
        batch.append(shard)
        nbytes += contents.shards[shard].nbytes
        if nbytes >= _VERIFY_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class CopiesFailed(RestoreFailed):
    """Copies that this process counted on cannot be used; ``unusable`` names them."""

    def __init__(self, step: int, unusable: Iterable[Quarantined]) -> None:
        self.unusable = tuple(unusable)
        names = "; ".join(map(str, self.unusable[:4]))
        super().__init__("restore", f"step {step}", f"copies cannot be used: {names}")


class ShardFetcher:
    """Fetches for one process and one save. Calls block; one at a time.

    Attributes:
      unusable: copies that failed so far, here and at peers.
      tally: bytes by where they came from.
    """

    def __init__(self, calls: HolderCalls, addresses: Mapping[str, str], *, save: SaveId) -> None:
        """``addresses``: of the holders, by name."""
        self._calls = calls
        self._addresses = addresses
        self._save = save
        self.unusable: list[Quarantined] = []
        self.tally = Tally()
        self._lock = threading.Lock()

    def mark_failed(self, copy: Quarantined, contents: Contents | None, detail: str) -> None:
        """Note that a copy cannot be used."""
        self.unusable.append(copy)
        leaf = "" if contents is None or copy.shard is None else str(contents.shard_id(copy.shard))
        self._calls.events.emit(
            "restore.quarantined",
            step=self._save.step,
            holder=copy.holder,
            shard=leaf,
            detail=detail,
        )

    def contents_from(
        self, sources: Sequence[ManifestHolders], shards: Collection[ShardId]
    ) -> tuple[str, Contents]:
        """Return the first manifest with ``shards`` that a holder gives, and its digest.

        CopiesFailed when no holder has such a manifest, HolderUnreachable.
        """
        digest_at = digests_by_holder(sources)

        def failed(holder: str, error: CheckpointError) -> None:
            self.mark_failed(Quarantined(holder, digest_at[holder]), None, str(error))

        def ask(holder: str) -> tuple[str, Contents]:
            digest = digest_at[holder]
            contents = self._contents_at(holder, digest)
            if not has_shards(contents, shards):  # the leader believed the holder's report
                problem = "the manifest lacks shards that its holder has reported"
                raise CorruptData("restore", f"manifest {digest[:12]} at {holder}", problem)
            return digest, contents

        what = f"manifest {sources[0].digest[:12]} of step {self._save.step}"
        answer = self._calls.first(what, tuple(digest_at), ask, failed)
        if answer is None:
            raise CopiesFailed(self._save.step, self.unusable)
        return answer

    def _contents_at(self, holder: str, digest: str) -> Contents:
        contents = fetch_contents(self._calls.client, self._addresses[holder], digest)
        if contents.save != self._save:
            target = f"manifest {digest[:12]} at {holder}"
            raise CorruptData("restore", target, f"it is of step {contents.save.step}")
        return contents

    def fetch_all(
        self,
        groups: Sequence[FetchGroup],
        contents: Mapping[str, Contents],
        places: Mapping[ShardId, int],
        into: _native.Mapping,
        arrived: Callable[[ShardId], object],
    ) -> dict[ShardId, int]:
        """Fetch every group into ``places`` of ``into``; return the CRC32C of each shard.

        CopiesFailed when a shard has no source left; HolderUnreachable when a holder that may have
        the shard did not answer until the deadline.

        Args:
          arrived: called with each shard as soon as it is there and checked, from several threads.
            The shard's bytes are not written again, even if other shards fail.
        """

        crcs: dict[ShardId, int] = {}

        def fetch(group: FetchGroup) -> None:
            self._fetch_group(group, contents[group.digest], places, into, arrived, crcs)

        with ThreadPoolExecutor(_MAX_SOURCES_AT_ONCE, "eckpt-fetch") as pool:
            for _ in pool.map(fetch, groups):
                pass
        return crcs

    def _fetch_group(
        self,
        group: FetchGroup,
        contents: Contents,
        places: Mapping[ShardId, int],
        into: _native.Mapping,
        arrived: Callable[[ShardId], object],
        crcs: dict[ShardId, int],
    ) -> None:
        """Fetch from the first source, and missing or damaged shards from the alternates.

        The alternates with another manifest come last. Adds to ``crcs``.
        """
        if not group.shards:
            return
        digest_at, manifests = group.digest_at, {group.digest: contents}

        def accept(source: str, shard: int, crc: int) -> None:
            """Accept a shard that has the CRC of capture time. A damaged shard is fetched again."""
            entry, name = contents.shards[shard], contents.shard_id(shard)
            if crc != entry.crc32c or name in crcs:
                return
            with self._lock:
                by_holder = self.tally.by_holder
                self.tally.peer += entry.nbytes
                by_holder[source] = by_holder.get(source, 0) + entry.nbytes
            crcs[name] = crc
            self._calls.got_one()
            arrived(name)

        def lacking() -> list[int]:
            return [shard for shard in group.shards if contents.shard_id(shard) not in crcs]

        def ask(source: str) -> bool | None:
            """Return True, once nothing is missing; None when ``source`` cannot give the rest."""
            digest = digest_at[source]
            if digest not in manifests:
                manifests[digest] = self._contents_at(source, digest)
            asked = same_shards(lacking(), contents, manifests[digest])
            if not asked:
                return None
            targets = [
                ShardTarget(index, contents.shards[shard].nbytes, places[contents.shard_id(shard)])
                for shard, index in asked
            ]
            received = self._calls.client.fetch_shards(
                self._addresses[source],
                digest,
                targets,
                into,
                deadline_left_s(self._calls.progress.end_s),
                lambda position, crc: accept(source, asked[position][0], crc),
                self._calls.progress.add,
            )
            for (shard, index), crc in zip(asked, received, strict=True):
                accept(source, shard, crc)
                if contents.shard_id(shard) not in crcs:
                    expected = contents.shards[shard].crc32c
                    detail = f"CRC32C {crc:08x} as received, expected {expected:08x}"
                    self.mark_failed(Quarantined(source, digest, index), manifests[digest], detail)
            return None if lacking() else True

        def failed(source: str, error: CheckpointError) -> None:
            self.mark_failed(Quarantined(source, digest_at[source]), None, str(error))

        what = f"shards of step {self._save.step}"
        if self._calls.first(what, tuple(digest_at), ask, failed) is None:
            raise CopiesFailed(self._save.step, self.unusable)
