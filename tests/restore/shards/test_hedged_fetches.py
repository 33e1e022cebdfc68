"""A holder that is far behind the others is cut; others are asked for what it has not brought."""

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
    send_frame,
)

from emergency_ckpt import _native
from emergency_ckpt.core.restore.plan_types import FetchGroup
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.shards import CopiesFailed, ShardFetcher
from emergency_ckpt.transfer import TransferClient, TransferServer
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

MIB = 1 << 20
SHARDS = 16
NBYTES = 4 * MIB


class Restored:
    """Sixteen shards fetched from holders by name, four of them asked first for a quarter each."""

    def __init__(self, streams: int = 2, deadline_s: float = 60) -> None:
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

    def fetch(self, addresses: dict[str, str], sources: list[tuple[str, ...]]) -> ShardFetcher:
        """Fetch a share of the shards from each of ``sources``; check every byte."""
        with TransferClient(
            run_id=RUN_ID, secret=SECRET, streams=self.streams, connect_timeout_s=20
        ) as client:
            sink = EventSink(self.events.append, process_index=0)
            calls = HolderCalls(sink, WorkProgress.until(time.monotonic() + self.deadline_s))
            self.fetcher = ShardFetcher(client, sink, calls, save=SAVE)
            share = SHARDS // len(sources)
            groups = [
                FetchGroup(self.digest, tuple(range(share * n, share * (n + 1))), names)
                for n, names in enumerate(sources)
            ]
            crcs = self.fetcher.fetch_all(
                groups,
                {self.digest: self.contents},
                addresses,
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

    def hedged(self) -> list[tuple[object, object]]:
        return [
            (event.fields["source"], event.fields["size_bytes"])
            for event in self.events
            if event.name == "restore.hedged"
        ]


def rotated(names: str) -> list[tuple[str, ...]]:
    """Return the sources of one group for each name, as the planner gives them."""
    return [tuple(names[n:] + names[:n]) for n in range(len(names))]


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


def test_slow_server_of_four_is_cut() -> None:
    restored = Restored()
    paces = {"a": 0.0, "b": 0.0, "c": 0.0, "d": 30.0}
    with serving(restored.holdings, paces) as addresses:
        fetcher = restored.fetch(addresses, rotated("abcd"))
    assert [source for source, _ in restored.hedged()] == ["d"]
    assert fetcher.tally.by_holder.get("d", 0) <= restored.streams * NBYTES
    assert fetcher.tally.peer == SHARDS * NBYTES
    assert fetcher.unusable == []


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


@pytest.mark.parametrize("admits", [True, False])
def test_peer_that_never_answers_does_not_decide(admits: bool) -> None:
    restored = Restored()
    paces = {"a": 0.0, "b": 0.0, "c": 0.0}
    with serving(restored.holdings, paces) as addresses, silent(admits=admits) as mute:
        fetcher = restored.fetch({**addresses, "d": mute}, rotated("abcd"))
    assert [source for source, _ in restored.hedged()] == ["d"]
    assert "d" not in fetcher.tally.by_holder
    assert set(fetcher.tally.by_holder) == set("abc")


def test_only_source_that_is_silent_is_cut_for_its_alternate() -> None:
    restored = Restored()
    with serving(restored.holdings, {"b": 0.0}) as addresses, silent(admits=True) as mute:
        fetcher = restored.fetch({**addresses, "a": mute}, [("a", "b")])
    assert fetcher.tally.by_holder == {"b": SHARDS * NBYTES}


def test_holders_that_are_slow_alike_are_not_cut() -> None:
    restored = Restored(streams=1)
    with serving(restored.holdings, dict.fromkeys("abcd", 0.6)) as addresses:
        fetcher = restored.fetch(addresses, rotated("abcd"))
    assert restored.hedged() == []
    assert fetcher.tally.by_holder == dict.fromkeys("abcd", SHARDS // 4 * NBYTES)


def test_whole_shards_of_the_slow_holder_stay() -> None:
    """It has brought one when it stalls; only what is left of its share comes from others."""
    restored = Restored(streams=1)
    left = [1]
    ended = threading.Event()

    def stall(_: int) -> None:
        if left:
            left.pop()
        else:
            ended.wait(60)

    with (
        serving(restored.holdings, {"a": 0.0, "b": 0.0, "c": 0.0}) as addresses,
        TransferServer(
            restored.holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=stall
        ) as stalling,
    ):
        fetcher = restored.fetch({**addresses, "d": stalling.contact}, rotated("abcd"))
        ended.set()
    ((source, again_bytes),) = restored.hedged()
    assert source == "d"
    assert isinstance(again_bytes, int)
    assert again_bytes <= 2 * NBYTES
    assert 0 < fetcher.tally.by_holder["d"] <= 2 * NBYTES


def test_late_bytes_of_the_cut_holder_land_nowhere() -> None:
    """What it sends after the cut is seen by nobody, also where arrays were made of the shard."""
    restored = Restored(streams=1)
    late = threading.Event()
    sent = threading.Event()

    def behave(sock: socket.socket) -> None:
        admit(sock)
        asked = read_frame(sock)
        send_frame(sock, {"type": "body", "nbytes": sum(n for _, _, n in asked["ranges"])})
        sock.sendall(b"\xee" * MIB)
        late.wait(60)
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(b"\xee" * MIB)
        sent.set()

    paces = {"a": 0.0, "b": 0.0, "c": 0.0}
    with (
        serving(restored.holdings, paces) as addresses,
        peer_that(behave) as wrong,
    ):
        restored.fetch({**addresses, "d": wrong}, rotated("abcd"))
        for n in range(SHARDS):
            _native.copy_crc32c(restored.into, [(b"mine", n * NBYTES)], 1)
        late.set()
        assert sent.wait(30)
    assert restored.bytes() == [b"mine" + data[4:] for data in restored.shards]


def test_damaged_bytes_of_the_alternate_fall_back_on_the_first() -> None:
    """The slow holder alone has them right: it is asked again, and waited for."""
    restored = Restored(streams=1)
    damaged = MemoryHoldings()
    assert damaged.add(SAVE, restored.shards) == restored.digest
    for shard in range(SHARDS // 2):
        damaged.corrupt(restored.digest, shard)
    asked: list[int] = []
    with (
        serving(damaged, {"b": 0.0}) as addresses,
        TransferServer(
            restored.holdings,
            run_id=RUN_ID,
            secret=SECRET,
            on_bytes_sent=lambda n: asked.append(n) or time.sleep(2.0 if len(asked) < 3 else 0),
        ) as first,
    ):
        fetcher = restored.fetch({**addresses, "a": first.contact}, [("a", "b"), ("b",)])
    assert [source for source, _ in restored.hedged()] == ["a"]
    assert {copy.holder for copy in fetcher.unusable} == {"b"}
    assert fetcher.tally.by_holder == dict.fromkeys("ab", SHARDS // 2 * NBYTES)


def test_both_holders_that_fail_are_named() -> None:
    """The first is cut, and has forgotten its copy when it is asked again; the other is damaged."""
    restored = Restored(streams=1, deadline_s=30)
    damaged = MemoryHoldings()
    damaged.add(SAVE, restored.shards)
    damaged.corrupt(restored.digest, 0)
    forgets = MemoryHoldings()
    forgets.add(SAVE, restored.shards)
    ended = threading.Event()

    def forget(_: int) -> None:
        with contextlib.suppress(KeyError):
            forgets.forget(restored.digest)
        ended.wait(30)

    with (
        serving(damaged, {"b": 0.0}) as addresses,
        TransferServer(forgets, run_id=RUN_ID, secret=SECRET, on_bytes_sent=forget) as first,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(ended.set)
        with pytest.raises(CopiesFailed):
            restored.fetch({**addresses, "a": first.contact}, [("a", "b"), ("b",)])
    assert {copy.holder for copy in restored.fetcher.unusable} == {"a", "b"}
