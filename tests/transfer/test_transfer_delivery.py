"""What a fetch delivers: the right bytes and CRCs, for every shape of request."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from memory_holdings import MemoryHoldings, anonymous_mapping
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    connect,
    fetch_all,
    fetch_contents,
    log_in,
    random_shards,
    read_body,
    read_frame,
    send_body,
    send_frame,
    targets_of,
)

from emergency_ckpt import _native
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.errors import HostStateTooLarge, NotHeld, TransferError
from emergency_ckpt.transfer import ShardTarget, TransferClient, TransferServer

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (0,),
        (0, 7, 0, 4096, 0),
        (13 * MIB + 5,),
        (9 * MIB, 3, 0, 5 * MIB + 1, 64),
        (1000,) * 2500,  # more than one request may name
        (0, 1, 15, 16, 4 * MIB, 4 * MIB - 1, 4 * MIB + 1, 9 * MIB, *([7] * 1500)),
    ],
    ids=["byte", "empty", "empty among others", "big", "mixed", "many", "around a piece"],
)
def test_fetch_delivers_every_shard(
    holdings: MemoryHoldings, streams: int, sizes: tuple[int, ...]
) -> None:
    shards = random_shards(*sizes)
    digest = holdings.add(SAVE, shards)
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=60) as server,
        TransferClient(run_id=RUN_ID, secret=SECRET, streams=streams) as client,
    ):
        data, crcs, contents = fetch_all(client, server.address, digest)
    assert data == shards
    assert crcs == [entry.crc32c for entry in contents.shards]


def test_no_shards_at_all_need_no_peer(client: TransferClient) -> None:
    into = anonymous_mapping(4096)
    assert client.fetch_shards("127.0.0.1:1", "0" * 64, [], into, 10) == []
    assert client.fetch_shards("127.0.0.1:1", "0" * 64, [ShardTarget(3, 0, 64)], into, 10) == [0]


def test_shards_go_where_wanted_and_nothing_else_changes(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    shards = random_shards(100, 6 * MIB, 300)
    digest = holdings.add(SAVE, shards)
    into = anonymous_mapping(8 * MIB)
    before = os.urandom(8 * MIB)
    _native.copy_crc32c(into, [(before, 0)], 1)
    wanted = [ShardTarget(2, 300, 7), ShardTarget(1, 6 * MIB, 1 * MIB + 3)]
    client.fetch_shards(server.address, digest, wanted, into, 60)
    expected = bytearray(before)
    expected[7:307] = shards[2]
    expected[MIB + 3 : 7 * MIB + 3] = shards[1]
    assert into.view(0, 8 * MIB, into).tobytes() == bytes(expected)


def test_bytes_are_counted_on_both_sides(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, random_shards(10 * MIB, 5))
    sent: list[int] = []
    received: list[int] = []
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=sent.append) as server,
        TransferClient(run_id=RUN_ID, secret=SECRET) as client,
    ):
        contents = fetch_contents(client, server.address, digest)
        into, targets = anonymous_mapping(11 * MIB), targets_of(contents)
        client.fetch_shards(server.address, digest, targets, into, 60, on_bytes=received.append)
    assert sum(received) == 10 * MIB + 5
    assert sum(sent) == 10 * MIB + 5 + len(holdings.contents_bytes(digest) or b"")
    assert len(contents.shards) == 2


def test_crc_told_is_of_what_came_not_of_what_was_meant(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(10, 9 * MIB, 10))
    holdings.corrupt(digest, 1)
    _, crcs, contents = fetch_all(client, server.address, digest)
    wrong = [i for i, entry in enumerate(contents.shards) if entry.crc32c != crcs[i]]
    assert wrong == [1]


def test_shard_that_is_gone_is_not_held_and_connection_goes_on(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(100))
    contents = fetch_contents(client, server.address, digest)
    holdings.forget(digest)
    into = anonymous_mapping(4096)
    with pytest.raises(NotHeld) as gone:
        client.fetch_shards(server.address, digest, targets_of(contents), into, 30)
    assert gone.value.target == server.address
    with pytest.raises(NotHeld):
        client.fetch_contents(server.address, digest)
    assert client.inventory(server.address).tensors == ()


def test_inventory_tells_what_is_held(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(1, 2))
    holdings.publish_host_state(SAVE, 1, 4, b"{}")
    assert client.inventory(server.address) == holdings.inventory()
    assert client.inventory(server.address).tensors[0].digest == digest


def test_host_states_travel_both_ways(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    data = os.urandom(17 * MIB)  # above 16 MiB, which was the limit of a reply once
    client.push_host_state(server.address, SAVE, 3, 8, data)
    assert holdings.host_state_bytes(SAVE, 3, 8) == data
    assert client.fetch_host_state(server.address, SAVE, 3, 8) == data
    with pytest.raises(NotHeld):
        client.fetch_host_state(server.address, SAVE, 2, 8)


def test_refused_host_state_is_error_at_pusher_with_reason(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    with pytest.raises(TransferError, match="not a document"):
        client.push_host_state(server.address, SAVE, 0, 1, b"refuse")
    client.push_host_state(server.address, SAVE, 0, 1, b"{}")
    assert holdings.host_state_bytes(SAVE, 0, 1) == b"{}"


def test_host_state_over_the_bound_is_not_sent(client: TransferClient) -> None:
    with pytest.raises(HostStateTooLarge):
        client.push_host_state("127.0.0.1:1", SAVE, 0, 1, bytes(MAX_HOST_STATE_BYTES + 1))


def test_target_outside_of_the_mapping_is_refused_at_once(
    client: TransferClient,
) -> None:
    into = anonymous_mapping(4096)
    for bad in (ShardTarget(0, 4097, 0), ShardTarget(0, 1, 4096), ShardTarget(0, 1, -1)):
        with pytest.raises(ValueError, match="leaves the mapping"):
            client.fetch_shards("127.0.0.1:1", "0" * 64, [bad], into, 10)


def test_many_clients_fetch_at_once(holdings: MemoryHoldings, server: TransferServer) -> None:
    shards = random_shards(3 * MIB, 1, 0, 700_000)
    digest = holdings.add(SAVE, shards)
    results: list[list[bytes]] = []

    def fetch() -> None:
        with TransferClient(run_id=RUN_ID, secret=SECRET, streams=3) as client:
            results.append(fetch_all(client, server.address, digest)[0])

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [shards] * 6


@contextlib.contextmanager
def stacks_of(each_bytes: int, *, room_bytes: int) -> Generator[None]:
    """New threads have stacks of this size, and the kernel has this much memory for all of them."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    threading.stack_size(each_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        threading.stack_size(0)


def test_fetch_goes_on_with_the_threads_that_start(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    shards = random_shards(64 * MIB)
    digest = holdings.add(SAVE, shards)
    targets = targets_of(fetch_contents(client, server.address, digest))
    into = anonymous_mapping(64 * MIB)
    with stacks_of(GIB, room_bytes=3 * GIB // 2):
        client.fetch_shards(server.address, digest, targets, into, 60)
    assert into.view(0, 64 * MIB, into).tobytes() == shards[0]


def test_fetch_without_any_thread_is_transfer_error(
    holdings: MemoryHoldings, server: TransferServer, client: TransferClient
) -> None:
    digest = holdings.add(SAVE, random_shards(MIB))
    targets = targets_of(fetch_contents(client, server.address, digest))
    into = anonymous_mapping(MIB)
    with (
        stacks_of(1024 * GIB, room_bytes=GIB // 2),
        pytest.raises(TransferError, match="no thread") as failed,
    ):
        client.fetch_shards(server.address, digest, targets, into, 60)
    assert failed.value.target == server.address


def test_server_without_a_thread_is_an_error_and_stops(holdings: MemoryHoldings) -> None:
    server = TransferServer(holdings, run_id=RUN_ID, secret=SECRET)
    with (
        stacks_of(1024 * GIB, room_bytes=GIB // 2),
        pytest.raises(TransferError, match="no thread"),
    ):
        server.start()
    server.stop()
    host, port = server.address.split(":")
    TransferServer(holdings, run_id=RUN_ID, secret=SECRET, bind_host=host, port=int(port)).stop()


def test_protocol_is_what_its_document_says(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, [b"abcdef", b"0123456789"])
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server,
        connect(server.address) as sock,
    ):
        answer = log_in(sock)
        assert answer["holder"] == server.contact.partition("@")[0]
        ranges = [[1, 2, 3], [0, 0, 6], [1, 9, 1], [1, 10, 0]]
        send_frame(sock, {"type": "get_shards", "digest": digest, "ranges": ranges})
        assert read_frame(sock) == {"type": "body", "nbytes": 10}
        assert read_body(sock, 10) == b"234abcdef9"
        place = {
            "run_id": RUN_ID,
            "incarnation": SAVE.incarnation,
            "step": 40,
            "owner": 0,
            "count": 2,
        }
        send_frame(sock, {"type": "put_host_state", **place, "nbytes": 2})
        assert read_frame(sock) == {"type": "go"}
        send_body(sock, b"{}")
        assert read_frame(sock) == {"type": "done"}
        send_frame(sock, {"type": "get_host_state", **place})
        assert read_frame(sock) == {"type": "body", "nbytes": 2}
        assert read_body(sock, 2) == b"{}"
