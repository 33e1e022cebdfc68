"""Connections to peers that have completed the handshake, kept for the next request."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from emergency_ckpt.core.address import format_address, parse_address, split_holder
from emergency_ckpt.errors import (
    AuthenticationFailed,
    NotHeld,
    ProtocolViolation,
    TransferError,
)
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import handshake, wire
from emergency_ckpt.transfer.stream import Stream, Timeout, timeout_until

T = TypeVar("T")

MAX_IDLE = 256
"""Bounded, because the leader of a restore asks every peer of a large job once."""

_NO_PROOF = "check run id, secret and address on both sides"
_NOBODY = (socket.EAI_NONAME, socket.EAI_NODATA)
"""A headless service without pods, or none any more, has no address."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


class NotConnected(TransferError):
    """No connection was made: refused, reset, silent, busy, or without a proof of the secret.

    It says nothing about what a peer holds.
    """


class UnprovedPeer(NotConnected):
    """The server at the address does not prove that it knows the secret of this run."""


class ConnectionPool:
    """Thread-safe. Keeps at most ``keep`` unused connections per address, ``MAX_IDLE`` in all."""

    def __init__(self, credentials: Credentials, *, connect_timeout_s: float, keep: int) -> None:
        self._credentials = credentials
        self._connect_timeout_s = connect_timeout_s
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: list[tuple[str, Stream]] = []  # by address; the one used last is last
        self._closed = False
        self._closed_there: set[str] = set()

    def call(
        self,
        operation: str,
        address: str,
        exchange: Callable[[Stream], T],
        *,
        connect_within_s: float = math.inf,
    ) -> T:
        """Run one request and its reply on a connection to ``address``.

        A kept connection may be dead. If it fails before the first byte of the reply, the exchange
        runs once more on a fresh connection. An OSError becomes a TransferError that names the
        address; NotConnected when no connection was made.
        """
        stream = self._take(address)
        if stream is not None:
            mark = stream.received_bytes
            try:
                return self._use(stream, address, exchange)
            except ConnectionError as error:
                self._note_closed(address)
                if stream.received_bytes > mark:
                    raise _failed(operation, address, error) from error
            except OSError as error:
                raise _failed(operation, address, error) from error
        stream = self._connect(operation, address, connect_within_s)
        try:
            return self._use(stream, address, exchange)
        except OSError as error:
            raise _failed(operation, address, error) from error

    def greet(self, address: str, within_s: float) -> None:
        """Make a new connection within ``within_s`` seconds, and keep it. Errors as of ``call``.

        A kept one looks alive also where the server is frozen, or its host went without a word.
        """
        stream = self._connect("greet", address, within_s)
        with self._lock:
            ended = [s for at, s in self._idle if at == address and not s.looks_alive()]
            self._idle = [pair for pair in self._idle if pair[1] not in ended]
        for dead in ended:
            dead.close()
        self._give_back(address, stream)

    def has_closed(self, address: str) -> bool:
        """Return whether a connection was closed from there, and none was made since."""
        with self._lock:
            if any(not stream.looks_alive() for at, stream in self._idle if at == address):
                self._closed_there.add(address)
            return address in self._closed_there

    def close(self) -> None:
        """Close unused connections; those in use are closed when their exchange ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, stream in idle:
            stream.close()

    def _use(self, stream: Stream, address: str, exchange: Callable[[Stream], T]) -> T:
        try:
            result = exchange(stream)
        except handshake.Refused as refused:
            # The reply was a whole frame, so the connection is usable, unless the server closes it.
            if refused.failure.code == "protocol":
                stream.close()
            else:
                self._give_back(address, stream)
            raise failure_error("request", address, refused.failure) from None
        except BaseException:
            stream.close()  # it may be in the middle of a body
            raise
        self._give_back(address, stream)
        return result

    def _take(self, address: str) -> Stream | None:
        while True:
            with self._lock:
                idle = [pair for pair in self._idle if pair[0] == address]
                if not idle:
                    return None
                self._idle.remove(idle[-1])
                _, stream = idle[-1]
            if stream.looks_alive():
                return stream
            self._note_closed(address)
            stream.close()

    def _note_closed(self, address: str) -> None:
        with self._lock:
            self._closed_there.add(address)

    def _give_back(self, address: str, stream: Stream) -> None:
        with self._lock:
            self._idle.append((address, stream))
            of_address = [pair for pair in self._idle if pair[0] == address]
            surplus: tuple[str, Stream] | None = None
            if self._closed or len(of_address) > self._keep:
                surplus = of_address[-1]
            elif len(self._idle) > MAX_IDLE:
                surplus = self._idle[0]
            if surplus is not None:
                self._idle.remove(surplus)
        if surplus is not None:
            surplus[1].close()

    def _connect(self, operation: str, address: str, within_s: float) -> Stream:
        """Return a connection after its handshake.

        A server that closes it before its proof may have had no place: it is tried again until the
        timeout, as a busy one that has proved the secret.
        """
        holder, plain = split_holder(address)
        place = parse_address(plain)
        limit_s = min(self._connect_timeout_s, within_s)
        deadline_s = time.monotonic() + limit_s
        timeout = timeout_until(deadline_s, limit_s, "connection")
        pause_s = _FIRST_PAUSE_S
        earlier: TransferError | None = None  # says more than that the time of a later try is over
        while True:
            try:
                stream = Stream(_connected(place, timeout), address)
            except OSError as error:
                raise earlier or _failed(operation, address, error, NotConnected) from error
            try:
                handshake.prove_to_server(stream, self._credentials, holder, timeout)
                with self._lock:
                    self._closed_there.discard(address)
                return stream
            except handshake.NotProved as error:
                stream.close()
                problem = f"no proof that this peer is of the run: {error}"
                raise UnprovedPeer(operation, address, problem, hint=_NO_PROOF) from error
            except handshake.Refused as refused:
                stream.close()
                failure = earlier = failure_error(operation, address, refused.failure)
                again = refused.failure.code == "busy"
            except OSError as error:
                stream.close()
                failure = earlier or _failed(operation, address, error, NotConnected)
                if isinstance(error, handshake.LeftUnproved):
                    problem = "the peer closed the connection in place of its proof"
                    failure = earlier = UnprovedPeer(operation, address, problem, hint=_NO_PROOF)
                again = isinstance(error, ConnectionError)
                failure.__cause__ = error
            except BaseException:
                stream.close()
                raise
            if not again or time.monotonic() + pause_s >= deadline_s:
                raise failure
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _connected(place: tuple[str, int], timeout: Timeout) -> socket.socket:
    """Return a connection to the first address of a name that answers.

    The addresses share the time that is left: ``socket.create_connection`` gives all of it to each.
    """
    failure: OSError | None = None
    addresses = [entry[4] for entry in socket.getaddrinfo(*place, type=socket.SOCK_STREAM)]
    for number, (host, port, *rest) in enumerate(addresses):
        scope = f"%{rest[1]}" if rest and rest[1] else ""  # of a link-local address of IPv6
        try:
            share_s = timeout() / (len(addresses) - number)
            return socket.create_connection((f"{host}{scope}", int(port)), share_s)
        except OSError as error:
            failure = error
    assert failure is not None, "a name without an address is an error"
    raise failure


_ERRORS: dict[wire.FailureCode, type[TransferError]] = {
    "not_held": NotHeld,
    "unauthenticated": AuthenticationFailed,
    "protocol": ProtocolViolation,
    "busy": NotConnected,
    "refused": TransferError,
}


def failure_error(operation: str, address: str, failure: wire.Failure) -> TransferError:
    """Return the typed error for a server's Failure."""
    problem = f"the peer answers {failure.code}: {failure.message!a}"
    return _ERRORS[failure.code](operation, address, problem)


def _failed(
    operation: str, address: str, error: OSError, kind: type[TransferError] = TransferError
) -> TransferError:
    timed_out = isinstance(error, TimeoutError)
    problem = "the peer did not answer in time" if timed_out else "the connection failed"
    return kind(operation, address, problem, actual=str(error) or type(error).__name__)


def each_address(address: str) -> list[str]:
    """Return the addresses that a name stands for, sorted; one that does not resolve as it is.

    The name of a headless service stands for a server at each of its addresses. Blocks for the
    resolver. TransferError when it is no address.
    """
    if split_holder(address)[0]:
        return [address]
    try:
        addresses = numeric_addresses(address)
    except NotConnected:
        return [address]
    # A name with one address stays a name: the error of a call then says the name.
    return addresses if len(addresses) > 1 else [address]


def numeric_addresses(address: str) -> list[str]:
    """Return the addresses of a name as numbers, sorted; none where the name stands for nobody.

    Blocks for the resolver. NotConnected when the resolver fails, so that nobody knows what the
    name stands for; another TransferError when ``address`` is no address.
    """
    host, port = parse_address(split_holder(address)[1])
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        if error.errno in _NOBODY:
            return []
        problem = f"cannot be resolved now: {error.strerror}"
        raise NotConnected("look up", address, problem) from error
    return sorted({format_address(str(place[0]), port) for _, _, _, _, place in entries})
