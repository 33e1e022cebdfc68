"""Peers that died, told from real servers that ended, were started again, or do not answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from memory_coordination import MemoryService
from memory_holdings import MemoryHoldings
from world import logged

from emergency_ckpt.cluster import LeftProcesses
from emergency_ckpt.cluster.peers import LostPeers, Peers
from emergency_ckpt.errors import CoordinationError, PeerLeft
from emergency_ckpt.transfer import TransferClient, TransferServer

SECRET = b"s" * 40


class TwoPeers(Peers):
    """Process 1, which has a server, and process 2, whose address is not known."""

    def __init__(self, service: MemoryService, client: TransferClient, contact: str) -> None:
        super().__init__(service.member(0), client)
        self._contact = contact

    def known(self) -> frozenset[int]:
        return frozenset({1, 2})

    def address_of(self, process: int) -> str:
        if process == 2:
            raise CoordinationError("find", "process 2", "its address is not known")
        return self._contact


def resets(listener: socket.socket) -> None:
    """Accept connections until the end of the test, and reset each."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


class Job:
    """Process 0, which looks, and the server of process 1."""

    def __init__(self, client: TransferClient, server: TransferServer) -> None:
        self.service = MemoryService(3)
        self.server = server
        self.client = client
        peers = TwoPeers(self.service, client, server.contact)
        self.lost = LostPeers(self.service.member(0), peers)

    def connect(self) -> None:
        self.client.greet(self.server.contact, 10.0)


@pytest.fixture
def job() -> Iterator[Job]:
    with TransferClient(run_id="run", secret=SECRET) as client:
        server = TransferServer(MemoryHoldings(), run_id="run", secret=SECRET, max_connections=1)
        server.start()
        try:
            yield Job(client, server)
        finally:
            server.stop()


def test_peer_that_closed_and_refuses_has_died(job: Job) -> None:
    job.connect()
    job.lost.inspect()
    job.server.stop()
    with pytest.raises(PeerLeft, match="process 1 has died: its connections were closed"):
        job.lost.inspect()


def test_peer_without_a_connection_is_left_to_others(job: Job) -> None:
    """A firewall may refuse, too."""
    job.server.stop()
    job.lost.inspect()


def test_peer_that_was_started_again_has_not_died(job: Job) -> None:
    job.connect()
    job.server.stop()
    port = int(job.server.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        job.lost.inspect()


def test_peer_that_resets_connections_has_not_died(job: Job) -> None:
    job.connect()
    job.server.stop()
    port = int(job.server.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=resets, args=(listener,), daemon=True).start()
        job.lost.inspect()
        listener.shutdown(socket.SHUT_RDWR)


def test_live_peer_that_closed_is_asked_once_and_by_proof(job: Job) -> None:
    """Else the peer would count each question as a stranger's."""
    contact = job.server.contact
    with logged() as lines:
        job.client.inventory(contact)
        with TransferClient(run_id="run", secret=SECRET) as other:
            other.inventory(contact)  # takes the only place, so the server closes the idle one
            assert job.client.has_closed(contact)
            job.lost.inspect()
        assert not job.client.has_closed(contact)
        job.server.stop()
    assert not [line for line in lines if "had proved the secret" in line]


def test_peer_whose_host_is_silent_has_not_died(job: Job) -> None:
    """A full queue of connections is silent as a host is that is gone."""
    job.connect()
    job.server.stop()
    port = int(job.server.address.rpartition(":")[2])
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind(("127.0.0.1", port))
        full.listen(0)
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        job.lost.inspect()


def test_peer_that_left_has_not_died(job: Job) -> None:
    job.connect()
    LeftProcesses(job.service.member(1)).gone("it has ended")
    job.server.stop()
    job.lost.inspect()


def test_nobody_is_told_dead_without_the_service(job: Job) -> None:
    job.connect()
    job.server.stop()
    job.service.fail(0, "find", "gone", CoordinationError("find", "gone", "unreachable"))
    job.lost.inspect()
