"""Connections that never prove themselves take nothing from those that did."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from memory_holdings import MemoryHoldings, anonymous_mapping
from places import JOBS
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    Shares,
    client_proof,
    connect,
    fetch_all,
    greet_by_hand,
    log_in,
    random_shards,
    read_exactly,
    read_frame,
    read_to_end,
    send_frame,
)

from emergency_ckpt.core.limits import MAX_UNPROVEN, MAX_UNPROVEN_PER_ADDRESS
from emergency_ckpt.transfer import ShardTarget, TransferClient, TransferServer, accept

MIB = 1 << 20
FLOOD = JOBS / "flood.py"


@contextmanager
def flood(address: str, rate: float, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Strangers at the address until the end; they have begun on entry."""
    program = [sys.executable, str(FLOOD), address, str(rate), str(seconds)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def fetch_fresh(address: str, digest: str, nbytes: int, rounds: int = 1) -> float:
    """Fetch with connections made for it, so that each has to come in; seconds of the longest."""
    longest_s = 0.0
    into = anonymous_mapping(nbytes)
    for _ in range(rounds):
        begin_s = time.monotonic()
        with TransferClient(run_id=RUN_ID, secret=SECRET, streams=2) as client:
            client.fetch_shards(address, digest, [ShardTarget(0, nbytes, 0)], into, 120)
        longest_s = max(longest_s, time.monotonic() - begin_s)
    return longest_s


def test_server_under_flood_serves_every_client(
    holdings: MemoryHoldings, server: TransferServer
) -> None:
    shards = random_shards(32 * MIB)
    digest = holdings.add(SAVE, shards)
    descriptors = len(os.listdir("/proc/self/fd"))
    with flood(server.address, 1000, 60) as strangers:
        for _ in range(8):
            fetch_fresh(server.address, digest, 32 * MIB)
        assert strangers.poll() is None  # the flood outlasted all of it
        assert len(os.listdir("/proc/self/fd")) < descriptors + MAX_UNPROVEN + 64


def test_server_full_of_strangers_takes_a_client(
    holdings: MemoryHoldings, server: TransferServer
) -> None:
    digest = holdings.add(SAVE, [b"x"])
    with ExitStack() as stack:
        silent = [
            stack.enter_context(connect(server.address))
            for _ in range(2 * MAX_UNPROVEN_PER_ADDRESS)
        ]
        with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
            assert fetch_all(client, server.address, digest)[0] == [b"x"]
        assert read_to_end(silent[0]) == b""  # the oldest made room


def test_strangers_take_no_place_of_a_proved_client(holdings: MemoryHoldings) -> None:
    """Even where one proved connection is all that the server has room for."""
    server = TransferServer(holdings, run_id=RUN_ID, secret=SECRET, max_connections=1)
    with server, connect(server.address) as proved, ExitStack() as stack:
        log_in(proved)
        for _ in range(2 * MAX_UNPROVEN_PER_ADDRESS):
            stack.enter_context(connect(server.address))
        send_frame(proved, {"type": "get_inventory"})
        assert read_frame(proved)["type"] == "body"


def connect_from(source: str, address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 30, source_address=(source, 0))


def test_strangers_of_one_address_push_out_their_own(server: TransferServer) -> None:
    """A accepted that waits between its two frames stays, while another address crowds in."""
    with connect(server.address) as slow, ExitStack() as stack:
        keys, _ = greet_by_hand(slow, Shares())
        strangers = [
            stack.enter_context(connect_from("127.0.0.2", server.address))
            for _ in range(3 * MAX_UNPROVEN_PER_ADDRESS)
        ]
        for sock in strangers[: 2 * MAX_UNPROVEN_PER_ADDRESS]:
            assert read_to_end(sock) == b""
        send_frame(slow, client_proof(keys.client_mac))
        assert len(read_exactly(slow, 4)) == 4  # its welcome


def test_strangers_are_logged_in_few_lines_escaped(
    server: TransferServer, caplog: pytest.LogCaptureFixture
) -> None:
    evil = '{"type":"hello","\\n\\u001b[2J\\u202eFORGED line ' + "x" * 700 + '":1}'
    for _ in range(50):
        with connect(server.address) as sock:
            sock.sendall(len(evil).to_bytes(4, "big") + evil.encode())
            assert read_to_end(sock) == b""
    lines = [record.getMessage() for record in caplog.records if "proved" in record.getMessage()]
    assert len(lines) == 1
    assert re.fullmatch(r"[ -~]{1,500}", lines[0])


def test_server_without_descriptors_warns_once_a_minute(
    holdings: MemoryHoldings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel keeps the connections that wait, so each try to accept one fails at once."""
    digest = holdings.add(SAVE, [b"x"])
    now_s, tries = 1000.0, threading.Semaphore(0)

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        tries.release()
        time.sleep(0.001)

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(accept, "time", clock)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = TransferServer(holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=1e6)
    with server, socket.socket() as waiting:
        host, _, port = server.address.rpartition(":")
        lowest_free = os.dup(waiting.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, most))
        try:
            waiting.connect((host, int(port)))
            for _ in range(1000):  # 100 s of the server's clock
                assert tries.acquire(timeout=60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
            assert fetch_all(client, server.address, digest)[0] == [b"x"]
    lines = [r.getMessage() for r in caplog.records if "accept" in r.getMessage()]
    assert len(lines) == 2
    assert "Too many open files" in lines[0]
    assert "(601 times since this was last logged)" in lines[1]
