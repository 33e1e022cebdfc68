"""Shards are used as they come: what is told early, and what a failure later may not touch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import pytest
from memory_holdings import MemoryHoldings, anonymous_mapping
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    admit,
    fetch_contents,
    peer_that,
    random_shards,
    read_frame,
    send_body,
    send_frame,
    targets_of,
)

from emergency_ckpt import _native
from emergency_ckpt.core.restore.plan_types import FetchGroup
from emergency_ckpt.errors import TransferError
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.shards import CopiesFailed, ShardFetcher
from emergency_ckpt.transfer import ShardTarget, TransferClient, TransferServer
from emergency_ckpt.types import Contents, ShardId
from emergency_ckpt.work_progress import WorkProgress

MIB = 1 << 20


@pytest.mark.parametrize("streams", [1, 3])
def test_each_shard_is_told_once_when_its_bytes_are_there(
    holdings: MemoryHoldings, server: TransferServer, streams: int
) -> None:
    shards = random_shards(9 * MIB, 3, 0, 5 * MIB + 1, 64)
    digest = holdings.add(SAVE, shards)
    told: dict[int, int] = {}
    with TransferClient(run_id=RUN_ID, secret=SECRET, streams=streams) as client:
        contents = fetch_contents(client, server.address, digest)
        targets = targets_of(contents)
        into = anonymous_mapping(16 * MIB)

        def on_shard(position: int, crc: int) -> None:
            assert position not in told
            told[position] = crc
            target = targets[position]
            assert into.view(target.offset, target.nbytes, into).tobytes() == shards[position]

        crcs = client.fetch_shards(server.address, digest, targets, into, 60, on_shard)
    assert told == {p: crc for p, crc in enumerate(crcs) if shards[p]}


def test_what_came_before_a_break_was_told(holdings: MemoryHoldings) -> None:
    shards = random_shards(4 * MIB, 4 * MIB, 4 * MIB)
    told: list[int] = []
    into = anonymous_mapping(12 * MIB)
    wanted = [ShardTarget(index, 4 * MIB, index * 4 * MIB) for index in range(3)]
    with (
        peer_that(one_shard_then_gone(shards[0])) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=1, streams=1) as client,
        pytest.raises(TransferError),
    ):
        client.fetch_shards(address, "ab" * 32, wanted, into, 60, lambda p, _: told.append(p))
    assert told == [0]


def test_what_the_callback_raises_ends_the_fetch(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(100))
    contents = fetch_contents(client, server.address, digest)

    def refuse(position: int, crc: int) -> None:
        raise ValueError(f"{position} is not wanted")

    into = anonymous_mapping(4096)
    with pytest.raises(ValueError, match="0 is not wanted"):
        client.fetch_shards(server.address, digest, targets_of(contents), into, 60, refuse)


def one_shard_then_gone(data: bytes) -> Callable[[socket.socket], None]:
    """A holder that gives one request of so many bytes, and dies: whoever comes again gets nothing.

    A client does come again, when a connection that it kept had ended before a byte of the reply.
    """
    left = [data]

    def behave(sock: socket.socket) -> None:
        if not left:
            return
        admit(sock)
        read_frame(sock)
        body = left.pop()
        send_frame(sock, {"type": "body", "nbytes": len(body)})
        send_body(sock, body)
        read_frame(sock)

    return behave


def test_shard_that_was_used_is_not_written_again(holdings: MemoryHoldings) -> None:
    """The first source dies after one shard; the second gives the others, and only these."""
    shards = random_shards(4 * MIB, 4 * MIB, 4 * MIB)
    digest = holdings.add(SAVE, shards)
    contents = contents_of(holdings, digest)
    into = anonymous_mapping(12 * MIB)
    places = {contents.shard_id(index): index * 4 * MIB for index in range(3)}
    arrived: list[ShardId] = []
    sent: list[int] = []

    def use(shard: ShardId) -> None:
        arrived.append(shard)
        if len(arrived) == 1:
            # Stands for arrays that were made of it: whoever writes here again is seen.
            _native.copy_crc32c(into, [(b"mine", places[shard])], 1)

    with (
        peer_that(one_shard_then_gone(shards[0])) as first,
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=sent.append) as second,
        TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=1, streams=1) as client,
    ):
        fetcher = fetcher_of(client, {"first": first, "second": second.address})
        group = FetchGroup(digest, (0, 1, 2), ("first", "second"))
        crcs = fetcher.fetch_all([group], {digest: contents}, places, into, use)
    assert arrived == list(places)
    assert crcs == {contents.shard_id(i): contents.shards[i].crc32c for i in range(3)}
    assert sum(sent) == 8 * MIB
    marks = [into.view(place, 4, into).tobytes() for place in places.values()]
    assert marks == [b"mine", shards[1][:4], shards[2][:4]]
    assert fetcher.unusable == []
    assert fetcher.tally.peer == 12 * MIB


def test_damaged_shard_is_not_told(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(100, 200))
    holdings.corrupt(digest, 1)
    contents = contents_of(holdings, digest)
    arrived: list[ShardId] = []
    fetcher = fetcher_of(client, {"only": server.address})
    places = {contents.shard_id(0): 0, contents.shard_id(1): 128}
    with pytest.raises(CopiesFailed):
        fetcher.fetch_all(
            [FetchGroup(digest, (0, 1), ("only",))],
            {digest: contents},
            places,
            anonymous_mapping(4096),
            arrived.append,
        )
    assert arrived == [contents.shard_id(0)]
    assert [(copy.holder, copy.shard) for copy in fetcher.unusable] == [("only", 1)]


def fetcher_of(client: TransferClient, addresses: Mapping[str, str]) -> ShardFetcher:
    sink = EventSink(None, process_index=0)
    calls = HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 60))
    return ShardFetcher(calls, addresses, save=SAVE)


def contents_of(holdings: MemoryHoldings, digest: str) -> Contents:
    with holdings.mapping_for(digest) as (_, contents):
        return contents
