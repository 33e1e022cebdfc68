"""Neighbours prove to each other at the start that they know the run's secret."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from memory_coordination import MemoryService, tell_address
from memory_holdings import MemoryHoldings

from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.errors import PeerUnreachable
from emergency_ckpt.start import PeerProbe, neighbours
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer

LONG_S, SOON_S = 60.0, 0.5
OURS, OTHERS = b"5e" * 32, b"0f" * 32


@contextlib.contextmanager
def serving(secret: bytes) -> Iterator[str]:
    server = TransferServer(MemoryHoldings(), run_id="run", secret=secret)
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


def greet(
    addresses: dict[int, str], timeout_s: float = LONG_S, connect_timeout_s: float = LONG_S
) -> None:
    """Let process 0 of three greet its neighbours."""
    member = MemoryService(3).member(0)
    for process, address in addresses.items():
        tell_address(member, process, address)
    with TransferClient(run_id="run", secret=OURS, connect_timeout_s=connect_timeout_s) as client:
        PeerProbe(Peers(member, client), (0, 3), timeout_s).finish()


@pytest.mark.parametrize(
    ("process", "count", "greeted"),
    [(0, 1, []), (0, 2, [1]), (1, 2, [0]), (0, 3, [1, 2]), (4, 1000, [3, 5]), (0, 1000, [1, 999])],
)
def test_neighbours_are_at_most_two(process: int, count: int, greeted: list[int]) -> None:
    assert neighbours(process, count) == greeted


def test_greetings_with_another_secret_are_an_error() -> None:
    with (
        serving(OURS) as first,
        serving(OTHERS) as second,
        pytest.raises(PeerUnreachable, match="in place of its proof"),
    ):
        # A peer that closes the connection may be at its limit, and is asked again until then.
        greet({1: first, 2: second}, connect_timeout_s=2.0)


def test_greetings_required_of_a_closed_port_are_an_error() -> None:
    with serving(OURS) as first:
        with serving(OURS) as second:
            pass
        with pytest.raises(PeerUnreachable, match=f"process 2 at {second}: it cannot be reached"):
            greet({1: first, 2: second})


def test_greetings_required_of_a_silent_peer_are_an_error() -> None:
    with serving(OURS) as first, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerUnreachable, match=f"process 2 at {address}"):
            greet({1: first, 2: address}, SOON_S)


def test_greetings_of_peers_that_answer_say_nothing() -> None:
    with serving(OURS) as first, serving(OURS) as second:
        greet({1: first, 2: second})
