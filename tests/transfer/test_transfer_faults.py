"""What the network and broken peers do: each ends in a typed error, within a deadline."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_holdings import MemoryHoldings, anonymous_mapping
from programs import serving
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    admit,
    connect,
    fetch_all,
    fetch_contents,
    log_in,
    peer_that,
    quick_client,
    random_shards,
    read_frame,
    read_to_end,
    send_body,
    send_frame,
    targets_of,
)

from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    NotHeld,
    ProtocolViolation,
    TransferError,
)
from emergency_ckpt.transfer import ShardTarget, TransferClient, TransferServer
from emergency_ckpt.transfer.pool import NotConnected
from emergency_ckpt.types import SaveId

MIB = 1 << 20
DIGEST = "ab" * 32


def fetch_one(client: TransferClient, address: str, nbytes: int, deadline_s: float) -> None:
    into = anonymous_mapping(nbytes)
    client.fetch_shards(address, DIGEST, [ShardTarget(0, nbytes, 0)], into, deadline_s)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    with quick_client() as client, pytest.raises(TransferError, match="refused") as failed:
        client.inventory(address)
    assert failed.value.retryable
    assert failed.value.target == address


@pytest.mark.parametrize("streams", [1, 3])
def test_peer_resets_in_mid_stream(streams: int) -> None:
    def behave(sock: socket.socket) -> None:
        admit(sock)
        while True:
            ranges = read_frame(sock)["ranges"]
            total = sum(nbytes for _, _, nbytes in ranges)
            send_frame(sock, {"type": "body", "nbytes": total})
            sock.sendall(bytes(total // 2))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()

    with peer_that(behave) as address, quick_client(streams=streams) as client:
        with pytest.raises(TransferError, match=f"{24 * MIB} bytes") as failed:
            fetch_one(client, address, 24 * MIB, 60)
        assert failed.value.target == address
        assert failed.value.retryable
        # Nobody may write into the caller's mapping any more.
        assert not [t for t in threading.enumerate() if t.name.startswith(f"fetch {address} ")]


def trickle(sock: socket.socket) -> None:
    admit(sock)
    request = read_frame(sock)
    send_frame(sock, {"type": "body", "nbytes": request["ranges"][0][2]})
    while True:
        sock.sendall(b"x")
        time.sleep(0.01)


def accept_and_never_answer(sock: socket.socket) -> None:
    read_to_end(sock)


def prove_and_never_answer(sock: socket.socket) -> None:
    admit(sock)
    read_to_end(sock)


@pytest.mark.parametrize("behave", [trickle, accept_and_never_answer, prove_and_never_answer])
@pytest.mark.parametrize(("io_timeout_s", "deadline_s"), [(0.4, 60), (60, 0.4)])
def test_slow_and_silent_peers_end_in_an_error(
    behave: Callable[[socket.socket], None], io_timeout_s: float, deadline_s: float
) -> None:
    with (
        peer_that(behave) as address,
        quick_client(io_timeout_s, streams=2) as client,
        pytest.raises(TransferError, match=r"in time|deadline") as failed,
    ):
        fetch_one(client, address, 20 * MIB, deadline_s)
    assert failed.value.target == address


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        ({"type": "body", "nbytes": 1}, ProtocolViolation, "another length"),
        ({"type": "done"}, ProtocolViolation, "not valid"),
        ({"type": "body", "nbytes": 100, "more": 1}, ProtocolViolation, "not valid"),
        ({"type": "body", "nbytes": -1}, ProtocolViolation, "not valid"),
        ({"type": "failure", "code": "not_held", "message": "x"}, NotHeld, "not_held"),
        ({"type": "failure", "code": "refused", "message": "x"}, TransferError, "refused"),
        ({"type": "failure", "code": "protocol", "message": "x"}, ProtocolViolation, "protocol"),
        ({"type": "failure", "code": "huh", "message": "x"}, ProtocolViolation, "not valid"),
        ({"type": "failure", "code": "busy", "message": "x" * 1001}, ProtocolViolation, "valid"),
    ],
)
def test_wrong_answers_are_typed_errors(
    answer: dict[str, object], error: type[CheckpointError], match: str
) -> None:
    def behave(sock: socket.socket) -> None:
        admit(sock)
        read_frame(sock)
        send_frame(sock, answer)
        read_to_end(sock)

    with (
        peer_that(behave) as address,
        quick_client() as client,
        pytest.raises(error, match=match) as failed,
    ):
        fetch_one(client, address, 100, 60)
    assert failed.value.target == address


def test_reply_over_the_bound_is_not_read() -> None:
    def behave(sock: socket.socket) -> None:
        admit(sock)
        read_frame(sock)
        send_frame(sock, {"type": "body", "nbytes": 1 << 40})
        read_to_end(sock)

    with peer_that(behave) as address, quick_client() as client:
        for ask in (
            lambda: client.inventory(address),
            lambda: client.fetch_contents(address, DIGEST),
            lambda: client.fetch_host_state(address, SAVE, 0, 1),
        ):
            with pytest.raises(ProtocolViolation, match="too long"):
                ask()


@pytest.mark.parametrize("data", [b"{}", b"[" * 100_000, b"\xff", b""])
def test_contents_and_inventories_that_are_none(data: bytes) -> None:
    def behave(sock: socket.socket) -> None:
        admit(sock)
        while True:
            read_frame(sock)
            send_frame(sock, {"type": "body", "nbytes": len(data)})
            send_body(sock, data)

    with peer_that(behave) as address, quick_client() as client:
        with pytest.raises(CorruptData, match="digest differs"):
            fetch_contents(client, address, DIGEST)
        with pytest.raises(ProtocolViolation, match="not valid"):
            client.inventory(address)


def test_kept_connection_that_died_is_replaced_once(holdings: MemoryHoldings) -> None:
    shards = random_shards(5 * MIB, 10)
    digest = holdings.add(SAVE, shards)
    with quick_client(streams=2) as client:
        with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
            fetch_all(client, server.address, digest)
            port = int(server.address.rpartition(":")[2])
        with TransferServer(holdings, run_id=RUN_ID, secret=SECRET, port=port) as server:
            assert fetch_all(client, server.address, digest)[0] == shards
        with pytest.raises(TransferError):
            client.inventory(server.address)


def test_greeting_of_a_frozen_server_is_an_error(ramdisk: Path) -> None:
    """The kept connection to it stays open, as where a machine goes without a word."""
    (ramdisk / "secret").touch(mode=0o600)
    (ramdisk / "secret").write_bytes(SECRET)
    with (
        serving(ramdisk, RUN_ID, "--secret-file", ramdisk / "secret") as (server, address),
        quick_client() as client,
    ):
        client.greet(address, 60)
        server.send_signal(signal.SIGSTOP)
        while not is_frozen(server.pid):
            time.sleep(0.01)
        with pytest.raises(NotConnected, match="in time"):
            client.greet(address, 0.3)
        server.send_signal(signal.SIGCONT)
        client.greet(address, 60)


def is_frozen(pid: int) -> bool:
    """Return whether all threads of a process are stopped."""
    tasks = Path(f"/proc/{pid}/task").glob("*/status")
    return all("State:\tT" in task.read_text() for task in tasks)


def test_greeting_forgets_connections_that_were_closed(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, random_shards(12 * MIB))
    with quick_client(streams=2) as client:
        with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
            fetch_all(client, server.address, digest)
            port = int(server.address.rpartition(":")[2])
        assert client.has_closed(server.address)
        with TransferServer(holdings, run_id=RUN_ID, secret=SECRET, port=port) as server:
            client.greet(server.address, 60)
            assert not client.has_closed(server.address)
        assert client.has_closed(server.address)


def test_request_is_sent_twice_at_most_and_only_before_a_reply() -> None:
    connections: list[int] = []

    def behave(sock: socket.socket) -> None:
        connections.append(1)
        admit(sock)
        if len(connections) == 1:  # one good answer, so that the connection is kept
            read_frame(sock)
            send_frame(sock, {"type": "failure", "code": "not_held", "message": ""})
        read_frame(sock)  # then always a close instead of an answer

    with peer_that(behave) as address, quick_client() as client:
        with pytest.raises(NotHeld):
            client.fetch_contents(address, DIGEST)
        with pytest.raises(TransferError):
            client.fetch_contents(address, DIGEST)
    assert len(connections) == 2


def test_server_stops_while_it_streams(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, [bytes(64 * MIB)])
    server = TransferServer(holdings, run_id=RUN_ID, secret=SECRET)
    server.start()
    with connect(server.address) as sock:
        log_in(sock)
        send_frame(sock, {"type": "get_shards", "digest": digest, "ranges": [[0, 0, 64 * MIB]]})
        assert read_frame(sock)["type"] == "body"  # the rest is more than the socket takes
        server.stop()
        assert len(read_to_end(sock)) < 64 * MIB
    server.stop()  # idempotent
    assert not [t for t in threading.enumerate() if t.name.startswith("transfer-")]


def test_client_whose_server_stops_has_an_error(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, [bytes(64 * MIB)])
    began = threading.Event()
    release = threading.Event()

    def pause(_: int) -> None:
        began.set()
        release.wait(30)

    server = TransferServer(
        holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=pause, io_timeout_s=10
    )
    server.start()
    errors: list[Exception] = []

    def fetch() -> None:
        with quick_client() as client:
            try:
                into = anonymous_mapping(64 * MIB)
                client.fetch_shards(server.address, digest, [ShardTarget(0, 64 * MIB, 0)], into, 60)
            except TransferError as error:
                errors.append(error)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    assert began.wait(30)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    release.set()
    stopping.join(30)
    fetching.join(30)
    assert len(errors) == 1
    assert f"{64 * MIB} bytes" in str(errors[0])


def test_server_all_connections_busy_tells_proved_client(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, [bytes(64 * MIB)])
    server = TransferServer(
        holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=60, max_connections=2
    )
    with server, connect(server.address) as first, connect(server.address) as second:
        for sock in (first, second):  # in the middle of an answer that nobody reads
            log_in(sock)
            ranges = [[0, 0, 64 * MIB]]
            send_frame(sock, {"type": "get_shards", "digest": digest, "ranges": ranges})
            assert read_frame(sock)["type"] == "body"
        with (
            quick_client(io_timeout_s=0.5) as client,
            pytest.raises(TransferError, match="2 connections are in use"),
        ):
            client.inventory(server.address)


def test_server_idle_connections_make_room(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, random_shards(12 * MIB))
    server = TransferServer(holdings, run_id=RUN_ID, secret=SECRET, max_connections=2)
    with server, connect(server.address) as first, connect(server.address) as second:
        for sock in (first, second):
            log_in(sock)
            send_frame(sock, {"type": "get_contents", "digest": DIGEST})
            assert read_frame(sock)["code"] == "not_held"
        # Both are about to be idle and give way; of four streams only two can be served at a time.
        with quick_client(streams=4) as client:
            client.inventory(server.address)
            fetch_all(client, server.address, digest)
        assert read_to_end(first) == b""


def test_no_descriptors_or_threads_are_left(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, random_shards(9 * MIB, 10))
    contents_targets = None

    def round_trip() -> None:
        nonlocal contents_targets
        with (
            TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server,
            quick_client(streams=3) as client,
        ):
            _, _, contents = fetch_all(client, server.address, digest)
            contents_targets = targets_of(contents)
            with pytest.raises(NotHeld):
                client.fetch_contents(server.address, DIGEST)
            with connect(server.address) as sock:
                sock.sendall(b"\0\0\0\1x")
                read_to_end(sock)

    round_trip()
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(5):
        round_trip()
    assert len(os.listdir("/proc/self/fd")) == before
    # Not their number: a thread of some other test may end meanwhile.
    assert set(threading.enumerate()) <= threads


class BrokenHoldings(MemoryHoldings):
    """Raises ``error`` wherever it is asked."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def inventory(self) -> HolderInventory:
        raise self.error

    def contents_bytes(self, digest: str) -> bytes | None:
        raise self.error

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        raise self.error

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        raise self.error

    def hold_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(5, "a bad disk")], ids=str)
@pytest.mark.parametrize(
    "ask",
    [
        lambda client, address: client.inventory(address),
        lambda client, address: client.fetch_contents(address, DIGEST),
        lambda client, address: client.fetch_host_state(address, SAVE, 0, 1),
        lambda client, address: client.push_host_state(address, SAVE, 0, 1, b"x"),
        lambda client, address: client.push_host_state(address, SAVE, 0, 1, b"x", for_storage=True),
    ],
    ids=["inventory", "contents", "host state", "push", "push for storage"],
)
def test_holder_that_fails_unexpectedly_says_why(
    error: Exception, ask: Callable[[TransferClient, str], object]
) -> None:
    with (
        TransferServer(BrokenHoldings(error), run_id=RUN_ID, secret=SECRET) as server,
        quick_client() as client,
    ):
        for _ in range(2):  # and goes on serving
            with pytest.raises(TransferError, match=r"a bug|a bad disk"):
                ask(client, server.address)


def test_failure_in_the_middle_of_a_body_is_not_taken_for_bytes() -> None:
    def fail(_: int) -> None:
        raise RuntimeError("a bug")

    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [bytes(24 * MIB)])
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, on_bytes_sent=fail) as server,
        quick_client() as client,
        pytest.raises(TransferError, match="bytes"),
    ):
        client.fetch_shards(
            server.address, digest, [ShardTarget(0, 24 * MIB, 0)], anonymous_mapping(24 * MIB), 60
        )
