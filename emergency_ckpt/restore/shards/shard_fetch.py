"""Fetches shards of one save from the sources that a plan names, and checks them."""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from emergency_ckpt.cluster.coordination import deadline_left_s
from emergency_ckpt.cluster.peers import fetch_contents
from emergency_ckpt.core.restore.inventory import Quarantined
from emergency_ckpt.core.restore.plan_types import FetchGroup, selected
from emergency_ckpt.errors import (
    RamdiskFull,
    RestoreFailed,
    TransferError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.protocol import Tally
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.source import ShardTarget, Target
from emergency_ckpt.types import Contents, SaveId, ShardId

_MAX_SOURCES_AT_ONCE = 8


class CopiesFailed(RestoreFailed):
    """Copies that the plan counted on cannot be used; ``unusable`` names them."""

    def __init__(self, step: int, unusable: Iterable[Quarantined]) -> None:
        self.unusable = tuple(unusable)
        names = "; ".join(
            f"shard {q.shard} of {q.digest[:12]} at {q.holder}" for q in self.unusable[:4]
        )
        super().__init__("restore", f"step {step}", f"copies cannot be used: {names}")


@dataclasses.dataclass(frozen=True)
class Fetching:
    """Tables of one restore, for every fetch: manifests by digest, addresses of holders."""

    contents: Mapping[str, Contents]
    addresses: Mapping[str, str]


class ShardFetcher:
    """Fetches for one process and one save. Calls block; one at a time.

    Attributes:
      unusable: copies that failed so far, here and at peers.
      tally: bytes by where they came from.
    """

    def __init__(
        self, client: TransferClient, events: EventSink, calls: HolderCalls, *, save: SaveId
    ) -> None:
        self._client = client
        self._events = events
        self._save = save
        self._calls = calls
        self.unusable: list[Quarantined] = []
        self.tally = Tally()
        self._lock = threading.Lock()

    def mark_failed(self, copy: Quarantined, contents: Contents | None, detail: str) -> None:
        """Note that a copy cannot be used."""
        self.unusable.append(copy)
        leaf = "" if contents is None or copy.shard is None else str(contents.shard_id(copy.shard))
        self._events.emit(
            "restore.quarantined",
            step=self._save.step,
            holder=copy.holder,
            shard=leaf,
            detail=detail,
        )

    def contents_from(self, group: FetchGroup, addresses: Mapping[str, str]) -> Contents:
        """The manifest of the group, from the first source that gives it.

        CopiesFailed when none has it, HolderUnreachable.
        """
        found = self._calls.first(
            f"manifest {group.digest[:12]} of step {self._save.step}",
            group.sources,
            lambda source: fetch_contents(self._client, addresses[source], group.digest),
            lambda source, error: self.mark_failed(
                Quarantined(source, group.digest), None, str(error)
            ),
        )
        if found is None:
            raise CopiesFailed(self._save.step, self.unusable)
        return found

    def fetch_all(
        self,
        groups: Sequence[FetchGroup],
        fetching: Fetching,
        places: Mapping[ShardId, int],
        into: Target,
        arrived: Callable[[ShardId], object],
    ) -> dict[ShardId, int]:
        """Fetch every group into ``places`` of ``into``; the CRC32C of each shard.

        CopiesFailed when a shard has no source left; HolderUnreachable when one that may have it
        did not answer until the deadline.

        Args:
          arrived: told of each shard as soon as it is there and checked, from several threads.
            Nobody writes to its bytes from then on, whatever becomes of the others.
        """

        def fetch(group: FetchGroup) -> dict[ShardId, int]:
            return self._fetch_group(group, fetching, places, into, arrived)

        crcs: dict[ShardId, int] = {}
        sources = min(_MAX_SOURCES_AT_ONCE, len(groups))
        with ThreadPoolExecutor(sources, "eckpt-fetch") as pool:
            for fetched in pool.map(fetch, groups):
                crcs.update(fetched)
        return crcs

    def _fetch_group(
        self,
        group: FetchGroup,
        fetching: Fetching,
        places: Mapping[ShardId, int],
        into: Target,
        arrived: Callable[[ShardId], object],
    ) -> dict[ShardId, int]:
        """Fetch from the first source; what does not come or is damaged, from the alternates."""
        contents, addresses = fetching.contents[group.digest], fetching.addresses
        wanted = list(selected(group.shards, contents))
        crcs: dict[ShardId, int] = {}
        if not wanted:
            return crcs

        def accept(source: str, shard: int, crc: int) -> None:
            """Check what came against the CRC of capture time. What is damaged comes again."""
            entry, name = contents.shards[shard], contents.shard_id(shard)
            if crc != entry.crc32c or name in crcs:
                return
            with self._lock:
                self.tally.peer += entry.nbytes
                of_holder = self.tally.by_holder
                of_holder[source] = of_holder.get(source, 0) + entry.nbytes
            crcs[name] = crc
            arrived(name)

        def ask(source: str) -> dict[ShardId, int] | None:
            """Everything, once nothing is left; None when the rest is damaged there."""
            left = [shard for shard in wanted if contents.shard_id(shard) not in crcs]
            try:
                received = self._client.fetch_shards(
                    addresses[source],
                    group.digest,
                    _targets(left, contents, places),
                    into,
                    deadline_left_s(self._calls.deadline_s),
                    lambda position, crc: accept(source, left[position], crc),
                )
            except TransferError as error:
                _raise_if_full(error, self._save.step)
                raise
            damaged = False
            for shard, crc in zip(left, received, strict=True):
                accept(source, shard, crc)
                if contents.shard_id(shard) not in crcs:
                    damaged = True
                    detail = _damage(crc, contents.shards[shard].crc32c)
                    self.mark_failed(Quarantined(source, group.digest, shard), contents, detail)
            return None if damaged else crcs

        found = self._calls.first(
            f"shards of step {self._save.step}",
            group.sources,
            ask,
            lambda source, error: self.mark_failed(
                Quarantined(source, group.digest), contents, str(error)
            ),
        )
        if found is None:
            raise CopiesFailed(self._save.step, self.unusable)
        return found


def _targets(
    shards: Iterable[int], contents: Contents, places: Mapping[ShardId, int]
) -> list[ShardTarget]:
    return [
        ShardTarget(shard, contents.shards[shard].nbytes, places[contents.shard_id(shard)])
        for shard in shards
    ]


def _damage(received: int, expected: int) -> str:
    return f"CRC32C {received:08x} as received, expected {expected:08x}"


def _raise_if_full(error: Exception, step: int) -> None:
    """A ramdisk that ran full while bytes came in is no fault of their source."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        raise RamdiskFull(
            "fetch", f"step {step}", str(cause), hint="enlarge the ramdisk"
        ) from error
