"""Bulk transfer of the native engine over real sockets: deadlines, signals, lost peers."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c
import pytest
from native_parts import AMPLE_S, SIZE_BYTES, Ends, contents, make_mapping

from emergency_ckpt import _native


def transfer(
    ends: Ends,
    source: _native.Mapping,
    sent: list[tuple[int, int]],
    received: list[tuple[int, int]],
) -> tuple[_native.Mapping, list[int]]:
    target = make_mapping()
    sender = threading.Thread(
        target=_native.send_ranges, args=(ends.sender.fileno(), source, sent, AMPLE_S)
    )
    sender.start()
    crcs = _native.receive_ranges(ends.receiver.fileno(), target, received, AMPLE_S)
    sender.join()
    return target, crcs


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("small_buffers", [True, False])
def test_ranges_arrive_with_their_crcs(
    ends: Ends, filled: _native.Mapping, blocking: bool, small_buffers: bool
) -> None:
    ends.sender.setblocking(blocking)
    ends.receiver.setblocking(blocking)
    if small_buffers:
        ends.sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # Out of order, and cut in another way: the stream carries bytes, not ranges.
    sent = [(2_000_000, 100_000), (5, 0), (17, 300_000)]
    received = [(1_000_000, 1), (0, 0), (33, 399_998), (2_000_000, 1)]
    target, crcs = transfer(ends, filled, sent, received)
    stream = contents(filled, 2_000_000, 100_000) + contents(filled, 17, 300_000)
    parts = [stream[:1], b"", stream[1:-1], stream[-1:]]
    assert [contents(target, *where) for where in received] == parts
    assert crcs == [google_crc32c.value(part) for part in parts]


def test_thousands_of_small_ranges(ends: Ends, filled: _native.Mapping) -> None:
    ranges = [(800 * i, 8) for i in range(5000)]
    target, crcs = transfer(ends, filled, ranges, ranges)
    assert crcs == _native.crc32c_ranges(filled, ranges, 2)
    assert crcs == _native.crc32c_ranges(target, ranges, 2)


def test_over_tcp(filled: _native.Mapping) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=AMPLE_S)
        receiver, _ = server.accept()
    with sender, receiver:
        whole = [(0, SIZE_BYTES)]
        _, crcs = transfer(Ends(sender, receiver), filled, whole, whole)
    assert crcs == _native.crc32c_ranges(filled, whole, 2)


@pytest.mark.parametrize("timeout_s", [0, 0.02])
def test_deadline_ends_both_directions(
    ends: Ends, mapping: _native.Mapping, timeout_s: float
) -> None:
    whole = [(0, SIZE_BYTES)]
    with pytest.raises(TimeoutError, match=f"{SIZE_BYTES} bytes missing"):
        _native.receive_ranges(ends.receiver.fileno(), mapping, whole, timeout_s)
    with pytest.raises(TimeoutError, match="bytes missing"):
        _native.send_ranges(ends.sender.fileno(), mapping, whole, timeout_s)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf, 1e9])
def test_deadline_must_be_one(ends: Ends, mapping: _native.Mapping, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be in"):
        _native.send_ranges(ends.sender.fileno(), mapping, [(0, 1)], timeout_s)
    with pytest.raises(ValueError, match="timeout_s must be in"):
        _native.receive_ranges(ends.receiver.fileno(), mapping, [(0, 1)], timeout_s)


def test_peer_that_closes_early_is_a_connection_error(ends: Ends, mapping: _native.Mapping) -> None:
    ends.sender.sendall(b"0123456789")
    ends.sender.close()
    with pytest.raises(ConnectionError, match="90 bytes missing"):
        _native.receive_ranges(ends.receiver.fileno(), mapping, [(0, 100)], AMPLE_S)


def test_sending_to_a_closed_peer_is_a_connection_error(
    ends: Ends, mapping: _native.Mapping
) -> None:
    ends.receiver.close()
    with pytest.raises(ConnectionError):  # and no SIGPIPE
        _native.send_ranges(ends.sender.fileno(), mapping, [(0, 100)], AMPLE_S)


def test_what_is_no_socket_is_an_os_error(mapping: _native.Mapping) -> None:
    for call in (_native.send_ranges, _native.receive_ranges):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call(-1, mapping, [(0, 1)], 1.0)


def wait_until_taken(receiver: socket.socket) -> None:
    """Until a running receive has taken all bytes sent so far: so it runs, and waits for more."""
    deadline_s = time.monotonic() + AMPLE_S
    while time.monotonic() < deadline_s:
        try:
            receiver.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        time.sleep(0.001)
    raise TimeoutError("the receive took nothing")


@dataclass
class Receive:
    """A receive of 100 bytes that another thread feeds: ``first``, then ``meanwhile()``, the rest.

    Were the GIL held in the receive, the feeding thread could not run and the deadline would pass.
    """

    ends: Ends
    mapping: _native.Mapping
    data: bytes = bytes(range(100))

    def run(self, meanwhile: Callable[[], None]) -> list[int]:
        def feed() -> None:
            self.ends.sender.sendall(self.data[:10])
            wait_until_taken(self.ends.receiver)
            meanwhile()
            self.ends.sender.sendall(self.data[10:])

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            return _native.receive_ranges(
                self.ends.receiver.fileno(), self.mapping, [(0, 100)], AMPLE_S
            )
        finally:
            feeder.join()


def test_blocking_receive_lets_other_threads_run(ends: Ends, mapping: _native.Mapping) -> None:
    ran: list[bool] = []
    receive = Receive(ends, mapping)
    assert receive.run(lambda: ran.append(True)) == [google_crc32c.value(receive.data)]
    assert ran


def test_blocking_send_lets_other_threads_run(ends: Ends, filled: _native.Mapping) -> None:
    # More than the socket holds: the send ends only if this thread, in Python, reads.
    received = bytearray()

    def drain() -> None:
        while len(received) < SIZE_BYTES:
            received.extend(ends.receiver.recv(1 << 20))

    reader = threading.Thread(target=drain)
    reader.start()
    _native.send_ranges(ends.sender.fileno(), filled, [(0, SIZE_BYTES)], AMPLE_S)
    reader.join()
    assert received == contents(filled, 0, SIZE_BYTES)


def test_signals_do_not_end_a_transfer(ends: Ends, mapping: _native.Mapping) -> None:
    receiving = threading.get_ident()
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    receive = Receive(ends, mapping)
    try:
        crcs = receive.run(lambda: signal.pthread_kill(receiving, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert crcs == [google_crc32c.value(receive.data)]
    assert handled == [signal.SIGUSR1]


def test_close_during_a_receive_is_safe(ends: Ends, mapping: _native.Mapping) -> None:
    view = mapping.view(0, 100, None)
    receive = Receive(ends, mapping)
    assert receive.run(mapping.close) == [google_crc32c.value(receive.data)]
    assert view.tobytes() == receive.data


def test_closing_socket_during_receive_does_not_redirect_it(
    ends: Ends, mapping: _native.Mapping
) -> None:
    receive = Receive(ends, mapping)

    receive.run(ends.receiver.close)
    assert contents(mapping, 0, 100) == receive.data
