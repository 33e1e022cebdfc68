"""Requests that break the rules of PROTOCOL.md: refused, and the next client is served."""

from __future__ import annotations

import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_holdings import MemoryHoldings
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    connect,
    fetch_all,
    log_in,
    random_shards,
    read_frame,
    read_to_end,
    send_frame,
)

from emergency_ckpt.transfer import TransferClient, TransferServer


@pytest.mark.parametrize(
    "request_frame",
    [
        {"type": "get_shards", "digest": None, "ranges": [[0, 0, 101]]},
        {"type": "get_shards", "digest": None, "ranges": [[0, 100, 1]]},
        {"type": "get_shards", "digest": None, "ranges": [[0, 1 << 62, 1 << 62]]},
        {"type": "get_shards", "digest": None, "ranges": [[1, 0, 1]]},
        {"type": "get_shards", "digest": None, "ranges": [[0, -1, 1]]},
        {"type": "get_shards", "digest": None, "ranges": []},
        {"type": "get_shards", "digest": None, "ranges": [[0, 0, 1]] * 1025},
        {"type": "get_shards", "digest": "../../etc/passwd", "ranges": [[0, 0, 1]]},
        {"type": "get_contents", "digest": "AB" * 32},
        {"type": "get_contents", "digest": "ab" * 32 + "\n"},
        {"type": "get_everything"},
        {"type": "get_inventory", "path": "/"},
    ],
)
def test_bad_requests_are_refused_and_the_next_client_is_served(
    holdings: MemoryHoldings, server: TransferServer, request_frame: dict[str, object]
) -> None:
    digest = holdings.add(SAVE, random_shards(100))
    with connect(server.address) as sock:
        log_in(sock)
        if request_frame.get("digest", "") is None:
            request_frame = {**request_frame, "digest": digest}
        send_frame(sock, request_frame)
        assert read_frame(sock)["code"] == "protocol"
        assert read_to_end(sock) == b""
    with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
        fetch_all(client, server.address, digest)


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": "../x"},
        {"incarnation": "a/b"},
        {"incarnation": ".hidden"},
        {"incarnation": ""},
        {"incarnation": "x" * 129},
        {"run_id": "other"},
        {"owner": 2},
        {"owner": -1},
        {"count": 0},
        {"step": -1},
        {"nbytes": (64 << 20) + 1},
    ],
)
def test_host_states_of_odd_identity_are_not_taken(
    holdings: MemoryHoldings, server: TransferServer, change: dict[str, object]
) -> None:
    good = {
        "type": "put_host_state",
        "run_id": RUN_ID,
        "incarnation": "i1",
        "step": 1,
        "owner": 0,
        "count": 2,
        "nbytes": 2,
    }
    with connect(server.address) as sock:
        log_in(sock)
        send_frame(sock, {**good, **change})
        assert read_frame(sock)["code"] == "protocol"
    assert holdings.inventory().host_states == ()


def test_oversize_frame_is_refused_unread(server: TransferServer) -> None:
    with connect(server.address) as sock:
        sock.sendall((1 << 20).to_bytes(4, "big") + b"x" * 100_000)
        assert read_to_end(sock) == b""
    with connect(server.address) as sock:
        log_in(sock)
        sock.sendall((0xFFFFFFFF).to_bytes(4, "big"))
        assert read_frame(sock)["code"] == "protocol"


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=300), proved=st.booleans(), framed=st.booleans())
def test_garbage_never_harms_the_server(
    holdings: MemoryHoldings, server: TransferServer, data: bytes, proved: bool, framed: bool
) -> None:
    with connect(server.address) as sock:
        if proved:
            log_in(sock)
        try:
            sock.sendall(len(data).to_bytes(4, "big") + data if framed else data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before all was sent
        read_to_end(sock)
    with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
        assert client.inventory(server.address) == holdings.inventory()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_almost_valid_frames_never_harm_the_server(
    holdings: MemoryHoldings, server: TransferServer, data: st.DataObject
) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=8,
    )
    names = ["get_inventory", "get_contents", "get_shards", "get_host_state", "put_host_state"]
    fields = ["digest", "ranges", "run_id", "incarnation", "step", "owner", "count", "nbytes"]
    fields += ["for_storage"]
    frame = data.draw(st.dictionaries(st.sampled_from(fields), values, max_size=8))
    frame["type"] = data.draw(st.sampled_from(names) | st.text(max_size=8))
    with connect(server.address) as sock:
        log_in(sock)
        send_frame(sock, frame)
        sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)
    with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
        assert client.inventory(server.address) == holdings.inventory()
