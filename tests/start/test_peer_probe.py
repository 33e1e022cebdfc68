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
from emergency_ckpt.events import Event, EventSink
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
    addresses: dict[int, str], timeout_s: float = LONG_S, *, required: bool = False
) -> list[Event]:
    """What process 0 of three says of its neighbours."""
    member = MemoryService(3).member(0)
    for process, address in addresses.items():
        tell_address(member, process, address)
    events: list[Event] = []
    with TransferClient(run_id="run", secret=OURS) as client:
        sink = EventSink(events.append, process_index=0)
        PeerProbe(Peers(member, client), (0, 3), sink, timeout_s).finish(required=required)
    return events


@pytest.mark.parametrize(
    ("process", "count", "greeted"),
    [(0, 1, []), (0, 2, [1]), (1, 2, [0]), (0, 3, [1, 2]), (4, 1000, [3, 5]), (0, 1000, [1, 999])],
)
def test_neighbours_are_at_most_two(process: int, count: int, greeted: list[int]) -> None:
    assert neighbours(process, count) == greeted


def test_greetings_of_peers_that_answer_say_nothing() -> None:
    with serving(OURS) as first, serving(OURS) as second:
        assert greet({1: first, 2: second}) == []


def test_greetings_with_another_secret_are_a_warning() -> None:
    """A stranger at a peer's address must not end the start; equal secrets are agreed elsewhere."""
    with serving(OURS) as first, serving(OTHERS) as second:
        (event,) = greet({1: first, 2: second})
        assert f"process 2 at {second} cannot be reached" in str(event.fields["text"])
        assert "no proof" in str(event.fields["text"])
        with pytest.raises(PeerUnreachable, match="no proof"):
            greet({1: first, 2: second}, required=True)


def test_greetings_at_a_closed_port_are_a_warning() -> None:
    with serving(OURS) as first:
        with serving(OURS) as second:
            pass
        (event,) = greet({1: first, 2: second})
    assert event.name == "start.warning"
    assert f"process 2 at {second} cannot be reached" in str(event.fields["text"])


def test_greetings_required_of_a_closed_port_are_an_error() -> None:
    with serving(OURS) as first:
        with serving(OURS) as second:
            pass
        with pytest.raises(PeerUnreachable, match=f"process 2 at {second}: it cannot be reached"):
            greet({1: first, 2: second}, required=True)


def test_greetings_required_of_a_silent_peer_are_an_error() -> None:
    with serving(OURS) as first, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerUnreachable, match=f"process 2 at {address}"):
            greet({1: first, 2: address}, SOON_S, required=True)


def test_greetings_required_of_peers_that_answer_say_nothing() -> None:
    with serving(OURS) as first, serving(OURS) as second:
        assert greet({1: first, 2: second}, required=True) == []


def test_greetings_of_a_silent_peer_end_at_the_deadline() -> None:
    with serving(OURS) as first, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (event,) = greet({1: first, 2: address}, SOON_S)
    assert f"process 2 at {address} cannot be reached" in str(event.fields["text"])
