"""Signs of real servers that end, refuse, or do not answer."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from memory_coordination import MemoryService
from memory_holdings import MemoryHoldings

from emergency_ckpt.cluster import LeftProcesses
from emergency_ckpt.cluster.left_processes import DeathWatch, PeerSigns
from emergency_ckpt.errors import PeerAbsent, PeerLeft
from emergency_ckpt.transfer import TransferClient, TransferServer

SECRET = b"s" * 40


@contextlib.contextmanager
def served() -> Iterator[tuple[TransferServer, TransferClient]]:
    with TransferClient(run_id="run", secret=SECRET) as client:
        server = TransferServer(MemoryHoldings(), run_id="run", secret=SECRET)
        server.start()
        try:
            yield server, client
        finally:
            server.stop()


def test_probe_of_a_server_that_ended_tells_a_death() -> None:
    with served() as (server, client):
        signs = PeerSigns(lambda _: server.contact, client)
        assert signs.probe(1).kind == "present"
        assert not signs.is_suspect(1)
        server.stop()
        assert signs.is_suspect(1)
        assert signs.probe(1).kind == "dead"


def test_probe_of_a_port_that_refuses_tells_an_absence() -> None:
    with served() as (server, client):
        server.stop()
        state = PeerSigns(lambda _: server.contact, client).probe(1)
        assert (state.kind, "refuses" in state.reason) == ("absent", True)


def test_probe_after_an_answer_knows_no_earlier_sign() -> None:
    with served() as (server, client):
        signs = PeerSigns(lambda _: server.contact, client)
        signs.probe(1)
        server.stop()
        port = int(server.address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            assert signs.probe(1).kind == "present"


def test_probe_of_a_host_that_does_not_answer_is_a_suspicion() -> None:
    """A full queue of connections is silent as a host is that is gone."""
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        signs = PeerSigns(lambda _: f"127.0.0.1:{full.getsockname()[1]}")
        assert signs.probe(1).kind == "present"
        assert signs.is_suspect(1)


def look_until_found(watch: DeathWatch) -> None:
    while True:
        watch.inspect()
        time.sleep(0.01)


@pytest.mark.parametrize("has_connection", [True, False])
def test_look_names_the_process_and_tells_the_others(has_connection: bool) -> None:
    with served() as (server, client):
        service = MemoryService(3)
        signs = PeerSigns(lambda _: server.contact, client)
        if has_connection:
            assert signs.probe(1).kind == "present"
        server.stop()
        watch = DeathWatch(signs, lambda: {1}, LeftProcesses(service.member(0)))
        error = PeerLeft if has_connection else PeerAbsent
        with pytest.raises(error, match="process 1"):
            look_until_found(watch)
        if has_connection:
            other = DeathWatch(signs, set, LeftProcesses(service.member(2)))
            with pytest.raises(PeerLeft, match="process 0 found"):
                look_until_found(other)


def test_look_passes_over_who_has_left() -> None:
    with served() as (server, client):
        service = MemoryService(3)
        signs = PeerSigns(lambda _: server.contact, client)
        signs.probe(1)
        LeftProcesses(service.member(1)).gone("it has ended")
        server.stop()
        LeftProcesses(service.member(0)).say_died(2, "its host refuses")
        watch = DeathWatch(signs, lambda: {1}, LeftProcesses(service.member(0)))
        with pytest.raises(PeerLeft, match="process 2"):
            look_until_found(watch)
