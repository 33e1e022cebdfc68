"""Attacks on connections: relayed, changed, replayed, reflected, reordered, cut, downgraded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
from faults import pieces_share_requests
from memory_holdings import MemoryHoldings, anonymous_mapping
from transfer_stranger import TAG, Tamper, pass_on, stranger_between
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    admit,
    connect,
    log_in,
    peer_that,
    quick_client,
    random_shards,
    read_exactly,
    read_frame,
    read_to_end,
    send_frame,
)

from emergency_ckpt.errors import AuthenticationFailed, TransferError
from emergency_ckpt.transfer import (
    ShardTarget,
    TransferServer,
    UnprovedPeer,
)
from emergency_ckpt.transfer.pool import NotConnected

MIB = 1 << 20
PIECES = (4 * MIB, 4 * MIB, 5)
SIZE = sum(PIECES)
NO_CHANGE_OF_CRC = (1 | 0x82F63B78 << 1).to_bytes(5, "little")
"""CRC32C's polynomial: whoever adds it anywhere to bytes leaves their CRC as it was."""


@pytest.fixture(autouse=True)
def one_request_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each piece would be asked for by itself."""
    pieces_share_requests(monkeypatch, 64 * MIB)


def server_of(holdings: MemoryHoldings) -> TransferServer:
    return TransferServer(holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=60)


def fetch_through(
    tamper: Tamper,
    shard: bytes,
    told: list[int] | None = None,
    timeout_s: float = 60,
) -> list[bytes]:
    """One shard of SIZE bytes, fetched through the stranger; its bytes as they arrived."""
    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [shard])
    into = anonymous_mapping(SIZE)
    heard = [] if told is None else told
    with (
        server_of(holdings) as server,
        stranger_between(server.address, tamper, pieces=[n + TAG for n in PIECES]) as address,
        quick_client(timeout_s) as client,
    ):
        wanted = [ShardTarget(0, SIZE, 0)]
        client.fetch_shards(address, digest, wanted, into, 60, lambda _, crc: heard.append(crc))
    return [into.view(0, SIZE, into).tobytes()]


def test_session_passed_on_unchanged_works() -> None:
    shards = random_shards(SIZE)
    assert fetch_through(pass_on, shards[0]) == shards


def test_session_relayed_and_kept_is_of_no_use(holdings: MemoryHoldings) -> None:
    digest = holdings.add(SAVE, [b"the state"])
    answers: list[bytes] = []
    requests = (
        {"type": "get_inventory"},
        {"type": "get_shards", "digest": digest, "ranges": [[0, 0, 9]]},
    )

    def relay(client: socket.socket) -> None:
        with connect(server.address) as sock:
            for source, target in ((client, sock), (sock, client), (client, sock)):
                header = read_exactly(source, 4)
                target.sendall(header + read_exactly(source, int.from_bytes(header, "big")))
            welcome = len(b'{"type":"welcome"}') + TAG
            read_exactly(sock, 4 + welcome)  # kept: the client waits, the connection is proved
            payload = json.dumps(requests[len(answers) % 2]).encode()
            sock.sendall(len(payload).to_bytes(4, "big") + payload + bytes(TAG))
            answers.append(read_to_end(sock))

    with server_of(holdings) as server, peer_that(relay) as address:
        for _ in requests:
            with quick_client(io_timeout_s=1) as client, pytest.raises(TransferError):
                client.inventory(address)
    for answer in answers:
        assert b"the state" not in answer
        assert digest.encode() not in answer
    assert len(answers) >= 2  # the client comes again, as after a restart of the server


@pytest.mark.parametrize("at", [0, 4 * MIB - 5, 2 * MIB])
def test_piece_changed_with_its_crc_kept_is_refused(at: int) -> None:
    told: list[int] = []

    def change(name: str, data: bytes) -> Sequence[bytes]:
        return [changed(data, at)] if name == "piece 1" else [data]

    with pytest.raises(AuthenticationFailed, match="not sealed"):
        fetch_through(change, random_shards(SIZE)[0], told)
    assert told == []


def changed(data: bytes, at: int) -> bytes:
    new = bytes(a ^ b for a, b in zip(data[at : at + 5], NO_CHANGE_OF_CRC, strict=True))
    return data[:at] + new + data[at + 5 :]


def swap_pieces() -> Tamper:
    held: list[bytes] = []

    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        if name == "piece 0":
            held.append(data)
            return []
        return [data, *held] if name == "piece 1" else [data]

    return tamper


def repeat_piece() -> Tamper:
    held: list[bytes] = []

    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        if name == "piece 0":
            held.append(data)
        return held if name == "piece 1" else [data]

    return tamper


def leave_out_piece() -> Tamper:
    return lambda name, data: [] if name == "piece 0" else [data]


def repeat_request() -> Tamper:
    return lambda name, data: [data, data] if name == "request" else [data]


def repeat_welcome() -> Tamper:
    held: list[bytes] = []

    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        if name == "welcome":
            held.append(data)
        return held if name == "reply" else [data]

    return tamper


def longer_request() -> Tamper:
    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        return [data[:-TAG] + b" " + data[-TAG:]] if name == "request" else [data]

    return tamper


def change_reply() -> Tamper:
    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        return (
            [data[:-TAG] + bytes([data[-TAG] ^ 1]) + data[1 - TAG :]] if name == "reply" else [data]
        )

    return tamper


@pytest.mark.parametrize(
    "attack", [swap_pieces, repeat_piece, leave_out_piece, repeat_welcome, change_reply]
)
def test_session_out_of_order_is_refused(attack: Callable[[], Tamper]) -> None:
    told: list[int] = []
    with pytest.raises(AuthenticationFailed, match="not sealed"):
        fetch_through(attack(), bytes(SIZE), told)
    assert told == []


@pytest.mark.parametrize("attack", [repeat_request, longer_request])
def test_request_repeated_or_changed_is_not_served(attack: Callable[[], Tamper]) -> None:
    seen: list[bytes] = []
    inner = attack()

    def tamper(name: str, data: bytes) -> Sequence[bytes]:
        if name == "rest":
            seen.append(data)
        return inner(name, data)

    try:
        fetch_through(tamper, bytes(SIZE))
    except TransferError:
        assert attack is longer_request
    assert sum(map(len, seen)) < 4096  # a refusal at most, never a second body


def test_request_reflected_at_its_client_is_refused() -> None:
    def behave(sock: socket.socket) -> None:
        admit(sock)
        header = read_exactly(sock, 4)
        sock.sendall(header + read_exactly(sock, int.from_bytes(header, "big") + TAG))
        read_to_end(sock)

    with (
        peer_that(behave) as address,
        quick_client() as client,
        pytest.raises(AuthenticationFailed, match="not sealed"),
    ):
        client.inventory(address)


@pytest.mark.parametrize("name", ["server_hello", "welcome", "reply", "piece 0", "piece 2"])
@pytest.mark.parametrize("keep", [0, 3])
def test_session_cut_anywhere_is_an_error(name: str, keep: int) -> None:
    told: list[int] = []
    cuts: list[str] = []

    def cut(unit: str, data: bytes) -> Iterator[bytes]:
        if unit == name:
            cuts.append(unit)
            yield data[:keep]
            raise ConnectionError("the stranger cuts both connections")
        yield data

    # Before the proof, and while the server may be busy, the client comes again until its timeout,
    # which a busy machine may need for what comes before the cut.
    timeout_s = 0.3 if name in ("server_hello", "welcome") else 60
    while not cuts:
        with pytest.raises(TransferError):
            fetch_through(cut, bytes(SIZE), told, timeout_s)
    assert told == []


@pytest.mark.parametrize(
    ("frame", "field", "value"),
    [
        ("server_hello", "holder", "0" * 32),
        ("server_hello", "share", "A" * 42 + "k="),
        ("hello", "share", "A" * 42 + "k="),
    ],
)
def test_handshake_changed_on_the_way_is_no_proof(
    holdings: MemoryHoldings, frame: str, field: str, value: object
) -> None:
    """Also for a client that knows no identity, so nobody between the two names another server."""

    def change(name: str, data: bytes) -> Sequence[bytes]:
        if name != frame:
            return [data]
        payload = json.dumps({**json.loads(data[4:]), field: value}).encode()
        return [len(payload).to_bytes(4, "big") + payload]

    with (
        server_of(holdings) as server,
        stranger_between(server.address, change) as address,
        quick_client(io_timeout_s=1) as client,
        pytest.raises(NotConnected),
    ):
        client.inventory(address)


def test_holder_another_than_asked_for_is_refused(holdings: MemoryHoldings) -> None:
    """The port of a server that is gone was taken by another one, of the same run."""
    with server_of(holdings) as first:
        gone, port = first.contact, int(first.address.rpartition(":")[2])
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, port=port) as second,
        quick_client() as client,
    ):
        with pytest.raises(UnprovedPeer, match="another server has that address"):
            client.inventory(gone)
        assert client.inventory(second.contact) == client.inventory(second.address)


def test_request_sealed_for_another_connection_is_refused(
    holdings: MemoryHoldings, server: TransferServer
) -> None:
    """The same client, the same request, at the same place: but of another connection."""
    sent: list[bytes] = []

    def record(name: str, data: bytes) -> Sequence[bytes]:
        if name == "request":
            sent.append(data)
        return [data]

    with stranger_between(server.address, record) as address, quick_client() as client:
        client.inventory(address)
    with connect(server.address) as sock:
        log_in(sock)
        sock.sendall(sent[0])
        assert read_frame(sock)["code"] == "unauthenticated"
        assert read_to_end(sock) == b""


def test_push_changed_on_the_way_is_not_kept(
    holdings: MemoryHoldings, server: TransferServer
) -> None:
    with connect(server.address) as sock:
        log_in(sock)
        place = {"run_id": RUN_ID, "incarnation": "i1", "step": 1, "owner": 0, "count": 2}
        send_frame(sock, {"type": "put_host_state", **place, "nbytes": 5})
        assert read_frame(sock) == {"type": "go"}
        sock.sendall(b"other" + bytes(TAG))
        assert read_frame(sock)["code"] == "unauthenticated"
    assert holdings.inventory().host_states == ()


def test_session_goodbye_between_requests_is_not_logged(
    holdings: MemoryHoldings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="absl")
    with server_of(holdings) as server:
        for rest in (b"", b"\0"):  # a goodbye, and a frame that is cut
            with connect(server.address) as sock:
                log_in(sock)
                sock.sendall(rest)
    left = [record.getMessage() for record in caplog.records if "left" in record.getMessage()]
    assert len(left) <= 1
    assert not any("after 0 of" in line for line in left)
