"""The server of the transfer protocol, for peers that know the run's secret."""

from __future__ import annotations

import functools
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from absl import logging

from emergency_ckpt.core.address import format_address
from emergency_ckpt.core.limits import MAX_MESSAGE_CHARS
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import (
    AuthenticationFailed,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    LocalTierError,
    NotHeld,
    ProtocolViolation,
    TransferError,
)
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.accept import Accept
from emergency_ckpt.transfer.handshake import SessionKeys, new_holder, seal
from emergency_ckpt.transfer.source import Holdings
from emergency_ckpt.transfer.stream import Stream, constant_timeout
from emergency_ckpt.types import Contents

_LINGER_BYTES = 256 * wire.KIB
_LINGER_S = 0.5
_BACKLOG = 1024
_HANDSHAKE_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0

T = TypeVar("T")


class Session:
    """Serves one sealed stream. ``run`` blocks until the client leaves, misbehaves or is stopped.

    ``idle_since`` is the monotonic time in seconds of the last answer; None during an answer and
    before the first one, because a client that has just proved the secret is about to ask.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        holdings: Holdings,
        run_id: str,
        io_timeout_s: float,
        on_bytes_sent: Callable[[int], None],
    ) -> None:
        self.stream = stream
        self.idle_since: float | None = None
        self.stopped = False
        self._waits_from_byte: int | None = None  # received before the request that is waited for
        self._in_body = False  # the client would read a frame as bytes of the body
        self._holdings = holdings
        self._run_id = run_id
        self._io_timeout_s = io_timeout_s
        self._on_bytes_sent = on_bytes_sent
        self._timeout = constant_timeout(io_timeout_s)

    def run(self) -> None:
        """Serve until the end of the connection, and close it. Raises nothing a peer can cause."""
        try:
            self._serve()
        except (ProtocolViolation, AuthenticationFailed) as error:
            logging.warning("transfer server: %s", error)
            is_sealed = isinstance(error, ProtocolViolation)
            self._refuse("protocol" if is_sealed else "unauthenticated", error)
        except OSError as error:
            # A client that leaves, also during a body, reports its own error. To close between
            # two requests, or to keep an unused connection, is its ordinary end.
            if self._waits_from_byte != self.stream.received_bytes:
                logging.info("transfer server: %s left: %s", self.stream.peer, error)
        except Exception as error:  # noqa: BLE001 - the peer must not be left to guess
            logging.exception(
                "transfer server: unexpected error while serving %s", self.stream.peer
            )
            if not self._in_body:
                self._refuse("refused", error)
        finally:
            self.stream.close()

    def stop(self) -> None:
        """Make ``run`` return soon. Called from another thread; does not block."""
        self.stopped = True
        self.stream.abort()

    def _serve(self) -> None:
        self.stream.send_frame(wire.Welcome(), self._io_timeout_s)
        while True:
            self._waits_from_byte = self.stream.received_bytes
            request = self.stream.receive_frame(wire.REQUEST, self._io_timeout_s)
            self.idle_since = self._waits_from_byte = None
            try:
                self._answer(request)
            except NotHeld as error:
                self._fail("not_held", error)
            except TransferError:
                raise
            except CheckpointError as error:
                logging.warning("transfer server: %s", error)
                self._fail("refused", error)
            self.idle_since = time.monotonic()

    def _answer(self, request: wire.Request) -> None:
        holdings = self._holdings
        match request:
            case wire.GetInventory():
                self._send_body(msgspec.json.encode(_ask(holdings.inventory)))
            case wire.GetContents():
                data = _ask(lambda: holdings.contents_bytes(request.digest))
                self._send_held(data, f"contents {request.digest}")
            case wire.GetShards():
                self._send_shards(request)
            case wire.GetHostState():
                data = None
                if request.run_id == self._run_id:
                    data = _ask(
                        lambda: holdings.host_state_bytes(
                            request.save, request.owner, request.count
                        )
                    )
                self._send_held(data, _describe(request))
            case wire.PutHostState():
                self._take_host_state(request)

    def _send_held(self, data: bytes | None, target: str) -> None:
        if data is None:
            raise NotHeld("serve", target, "not held here")
        self._send_body(data)

    def _send_body(self, data: bytes) -> None:
        self._announce(len(data))
        self.stream.send_body(data, self._timeout)
        self._in_body = False
        self._on_bytes_sent(len(data))

    def _announce(self, nbytes: int) -> None:
        self._in_body = True
        self.stream.send_frame(wire.Body(nbytes=nbytes), self._io_timeout_s)

    def _send_shards(self, request: wire.GetShards) -> None:
        with self._holdings.mapping_for(request.digest) as (mapping, contents):
            ranges = [self._locate(contents, part) for part in request.ranges]
            self._announce(sum(nbytes for _, nbytes in ranges))
            self.stream.send_ranges(mapping, ranges, self._timeout, self._on_bytes_sent)
            self._in_body = False

    def _locate(self, contents: Contents, part: wire.ByteRange) -> tuple[int, int]:
        index, start, nbytes = part
        if index >= len(contents.shards):
            raise ProtocolViolation(
                "serve",
                self.stream.peer,
                "no such shard",
                expected=f"below {len(contents.shards)}",
                actual=index,
            )
        shard = contents.shards[index]
        if start + nbytes > shard.nbytes:
            raise ProtocolViolation(
                "serve",
                self.stream.peer,
                f"the range leaves shard {index}",
                expected=f"an end of at most {shard.nbytes}",
                actual=start + nbytes,
            )
        return shard.offset + start, nbytes

    def _take_host_state(self, request: wire.PutHostState) -> None:
        if request.run_id != self._run_id or request.owner >= request.count:
            raise ProtocolViolation(
                "serve", self.stream.peer, f"{_describe(request)} cannot be of this run"
            )
        self.stream.send_frame(wire.Go(), self._io_timeout_s)
        data = self.stream.receive_body(request.nbytes, self._timeout)
        try:
            holdings = self._holdings
            keep = holdings.hold_host_state if request.for_storage else holdings.publish_host_state
            keep(request.save, request.owner, request.count, data)
        except (CheckpointError, OSError) as error:
            # The client must learn that its buddy has no copy; the connection stays usable.
            logging.warning("transfer server: %s was not kept: %s", _describe(request), error)
            self._fail("refused", error)
            return
        self.stream.send_frame(wire.Done(), self._io_timeout_s)

    def _fail(self, code: wire.FailureCode, error: Exception) -> None:
        failure = wire.Failure(code=code, message=valid_text(str(error), MAX_MESSAGE_CHARS))
        self.stream.send_frame(failure, self._io_timeout_s)

    def _refuse(self, code: wire.FailureCode, error: Exception) -> None:
        try:
            self._fail(code, error)
        except OSError:
            return  # the peer did not wait for the reason; the log has it
        self.stream.linger(_LINGER_BYTES, _LINGER_S)


def _ask(question: Callable[[], T]) -> T:
    """Return the holdings' answer; an OSError of theirs must not look like a lost connection."""
    try:
        return question()
    except OSError as error:
        raise LocalTierError("serve", "the ramdisk", str(error)) from error


def _describe(request: wire.GetHostState | wire.PutHostState) -> str:
    return (
        f"host state {request.owner} of {request.count} at step {request.step}"
        f" ({request.incarnation})"
    )


class TransferServer:
    """Listens on one named address; one thread per proved connection, ``max_connections`` at most.

    The address is bound at construction, so that other processes can be told it; connections are
    accepted from ``start`` until ``stop``. Those that have not proved the secret have places of
    their own (``accept``). When all connections are in use, the one that has been idle longest is
    closed for a new one (its client reconnects); when none is idle, the new client is told that the
    server is busy.

    Attributes:
      address: ``host:port``.
      contact: ``holder@host:port``, with an identity drawn at construction. A client that has this
        text reaches this server or gets an error, never another server that took its port.

    Args:
      io_timeout_s: maximum time in seconds of an idle connection, or a stall in a frame or piece.
      on_bytes_sent: called from the serving threads with the number of bytes of bodies sent.

    Raises ConfigError for an address that cannot be bound or means all interfaces, and for a secret
    that is too short.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        run_id: str,
        secret: bytes,
        bind_host: str = "127.0.0.1",
        port: int = 0,
        io_timeout_s: float = 30,
        max_connections: int = 64,
        on_bytes_sent: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        credentials = Credentials(run_id, secret)
        self._new_session = functools.partial(
            Session,
            holdings=holdings,
            run_id=run_id,
            io_timeout_s=io_timeout_s,
            on_bytes_sent=on_bytes_sent,
        )
        self._max_connections = max_connections
        self._listener, self.address = _bind(bind_host, port)
        drop_in_child(self._listener, socket.socket.close)
        holder = new_holder()
        self.contact = f"{holder}@{self.address}"
        self._accept = Accept(
            self._listener,
            credentials,
            holder,
            timeout_s=min(_HANDSHAKE_TIMEOUT_S, io_timeout_s),
            on_proved=self._admit,
        )
        self._accepting: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._leaving: list[threading.Thread] = []  # finished their session, perhaps still running

    def start(self) -> None:
        """Begin to serve. Does not block. Call once. ConfigError when the port is taken.

        TransferError when the process can start no thread.
        """
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                [f"transfer address {self.address}: {error}"], target="transfer server"
            ) from error
        accepting = threading.Thread(
            target=self._accept.run, name=f"transfer-server {self.address}", daemon=True
        )
        try:
            accepting.start()
        except RuntimeError as error:
            raise TransferError(
                "start", f"transfer server {self.address}", "no thread can start", actual=str(error)
            ) from error
        self._accepting = accepting  # ``stop`` cannot wait for one that was not started

    def stop(self) -> None:
        """End every connection and wait for the threads. Idempotent.

        DeadlineExceeded when a thread does not end: the holdings must then stay open.
        """
        self._stopping.set()
        self._accept.close_down()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        threads = [self._accepting] if self._accepting else []
        for thread in threads:
            thread.join(_STOP_TIMEOUT_S)
        with self._lock:
            for session in self._sessions:
                session.stop()
            threads += [*self._sessions.values(), *self._leaving]
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0))
        self._listener.close()
        alive = [thread.name for thread in threads if thread.is_alive()]
        if alive:
            raise DeadlineExceeded(
                "stop", f"transfer server {self.address}", "threads do not end", missing=alive
            )

    def __enter__(self) -> TransferServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _admit(self, sock: socket.socket, peer: str, keys: SessionKeys) -> None:
        stream = Stream(sock, peer)
        seal(stream, keys, is_server=True)
        session = self._new_session(stream)
        with self._lock:
            if self._stopping.is_set():
                stream.close()
                return
            if self._make_room() and self._start_session(session):
                return
        logging.warning("transfer server %s: all connections are in use", self.address)
        busy = wire.Failure(code="busy", message=f"{self._max_connections} connections are in use")
        try:
            stream.send_frame(busy, 0)  # fits into the buffer of a fresh connection
        except OSError as error:
            logging.info("transfer server: %s left: %s", peer, error)
        stream.close()

    def _start_session(self, session: Session) -> bool:
        thread = threading.Thread(
            target=self._run,
            args=(session,),
            name=f"transfer-session {session.stream.peer}",
            daemon=True,
        )
        self._sessions[session] = thread
        self._leaving = [leaving for leaving in self._leaving if leaving.is_alive()]
        try:
            thread.start()
        except RuntimeError as error:  # the process can start no more threads: busy
            del self._sessions[session]
            logging.error("transfer server %s: %s", self.address, error)
            return False
        return True

    def _make_room(self) -> bool:
        staying = [session for session in self._sessions if not session.stopped]
        if len(staying) < self._max_connections:
            return True
        idle = [(s.idle_since, s) for s in staying if s.idle_since is not None]
        if idle:
            _, longest = min(idle, key=lambda item: item[0])
            longest.stop()
        return bool(idle)

    def _run(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._leaving.append(self._sessions.pop(session))


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, name = addresses[0]
        everywhere = ipaddress.ip_address(str(name[0]).partition("%")[0]).is_unspecified
        if everywhere or not host:
            raise ConfigError(
                [f"transfer address {host!r} means all interfaces: name the one that peers reach"],
                target="transfer server",
            )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(name)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            [f"transfer address {host!r} port {port}: {error}"], target="transfer server"
        ) from error
    bound_host, bound_port = listener.getsockname()[:2]
    return listener, format_address(str(bound_host), int(bound_port))
