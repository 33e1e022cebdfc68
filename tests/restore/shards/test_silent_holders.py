"""A holder that is silent is given up: another is asked for what it has not brought."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from memory_holdings import MemoryHoldings, anonymous_mapping
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    admit,
    peer_that,
    random_shards,
    read_frame,
)

from emergency_ckpt.core.restore.plan_types import FetchGroup
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.shards import ShardFetcher
from emergency_ckpt.transfer import TransferClient, TransferServer
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

MIB = 1 << 20
SHARDS = 16
NBYTES = 4 * MIB


class Restored:
    """Sixteen shards fetched from holders, of which one may be silent for two seconds."""

    def __init__(self, streams: int = 2, deadline_s: float = 60, connect_s: float = 20) -> None:
        self.holdings = MemoryHoldings()
        self.shards = random_shards(*[NBYTES] * SHARDS)
        self.digest = self.holdings.add(SAVE, self.shards)
        with self.holdings.mapping_for(self.digest) as (_, self.contents):
            pass
        self.events: list[Event] = []
        self.arrived: list[ShardId] = []
        self.into = anonymous_mapping(SHARDS * NBYTES)
        self.streams = streams
        self.deadline_s = deadline_s
        self.connect_s = connect_s

    def fetch(self, addresses: dict[str, str], sources: list[tuple[str, ...]]) -> ShardFetcher:
        """Fetch a share of the shards from each of ``sources``; check every byte."""
        with TransferClient(
            run_id=RUN_ID,
            secret=SECRET,
            streams=self.streams,
            connect_timeout_s=self.connect_s,
            io_timeout_s=3,
        ) as client:
            sink = EventSink(self.events.append, process_index=0)
            progress = WorkProgress.until(time.monotonic() + self.deadline_s)
            calls = HolderCalls(client, sink, progress)
            self.fetcher = ShardFetcher(calls, addresses, save=SAVE)
            share = SHARDS // len(sources)
            groups = [
                FetchGroup(self.digest, tuple(range(share * n, share * (n + 1))), names)
                for n, names in enumerate(sources)
            ]
            crcs = self.fetcher.fetch_all(
                groups,
                {self.digest: self.contents},
                self.places,
                self.into,
                self.arrived.append,
            )
        assert crcs == {
            self.contents.shard_id(n): entry.crc32c for n, entry in enumerate(self.contents.shards)
        }
        assert self.bytes() == self.shards
        assert sorted(self.arrived) == sorted(self.places), "each is told once"
        return self.fetcher

    @property
    def places(self) -> dict[ShardId, int]:
        return {self.contents.shard_id(n): n * NBYTES for n in range(SHARDS)}

    def bytes(self) -> list[bytes]:
        return [self.into.view(n * NBYTES, NBYTES, self).tobytes() for n in range(SHARDS)]


@contextlib.contextmanager
def serving(holdings: MemoryHoldings, paces: dict[str, float]) -> Iterator[dict[str, str]]:
    """Yield the addresses of servers that rest so many seconds after each piece of 4 MiB."""
    ended = threading.Event()

    def paced(pace_s: float) -> Callable[[int], object]:
        return lambda _: ended.wait(pace_s)

    with contextlib.ExitStack() as stack:
        addresses = {
            name: stack.enter_context(
                TransferServer(
                    holdings,
                    run_id=RUN_ID,
                    secret=SECRET,
                    on_bytes_sent=paced(pace_s),
                )
            ).contact
            for name, pace_s in paces.items()
        }
        stack.callback(ended.set)
        yield addresses


@contextlib.contextmanager
def silent(*, admits: bool) -> Iterator[str]:
    """Yield the address of a peer that never answers a request, or not even a handshake."""
    ended = threading.Event()

    def behave(sock: socket.socket) -> None:
        if admits:
            admit(sock)
            read_frame(sock)
        ended.wait(60)

    with peer_that(behave) as address:
        try:
            yield address
        finally:
            ended.set()


@pytest.mark.dear
@pytest.mark.parametrize("admits", [True, False])
def test_silence_of_a_holder_lets_another_be_asked(admits: bool) -> None:
    restored = Restored(connect_s=20 if admits else 3)
    with serving(restored.holdings, {"b": 0.0}) as addresses, silent(admits=admits) as mute:
        fetcher = restored.fetch({**addresses, "a": mute}, [("a", "b")])
    assert fetcher.tally.by_holder == {"b": SHARDS * NBYTES}
    assert fetcher.unusable == [], "silence says nothing of a copy"


def test_whole_shards_of_the_silent_holder_stay() -> None:
    """It has brought one when it stalls; only what is left comes from another."""
    restored = Restored(streams=1)
    left = [1]
    ended = threading.Event()

    def stall(_: int) -> None:
        if left:
            left.pop()
        else:
            ended.wait(60)

    with (
        serving(restored.holdings, {"a": 0.0}) as addresses,
        TransferServer(
            restored.holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=stall
        ) as stalling,
    ):
        fetcher = restored.fetch(
            {**addresses, "d": stalling.contact}, [("d", "a"), ("a",), ("a",), ("a",)]
        )
        ended.set()
    assert 0 < fetcher.tally.by_holder["d"] <= 2 * NBYTES
    assert fetcher.tally.peer == SHARDS * NBYTES


@pytest.mark.dear
def test_damaged_bytes_of_the_alternate_fall_back_on_the_first() -> None:
    """The silent holder alone has them right: it is asked again, and speaks then."""
    restored = Restored(streams=1)
    damaged = MemoryHoldings()
    assert damaged.add(SAVE, restored.shards) == restored.digest
    for shard in range(SHARDS):
        damaged.corrupt(restored.digest, shard)
    asked: list[int] = []
    with (
        serving(damaged, {"b": 0.0}) as addresses,
        TransferServer(
            restored.holdings,
            run_id=RUN_ID,
            secret=SECRET,
            on_bytes_sent=lambda n: asked.append(n) or time.sleep(0 if len(asked) > 1 else 4.0),
        ) as first,
    ):
        fetcher = restored.fetch({**addresses, "a": first.contact}, [("a", "b")])
    assert {copy.holder for copy in fetcher.unusable} == {"b"}
    assert fetcher.tally.by_holder == {"a": SHARDS * NBYTES}
