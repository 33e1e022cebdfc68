"""The server of the transfer protocol, for peers that know the run's secret."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable

from absl import logging

from emergency_ckpt.core.address import format_address
from emergency_ckpt.errors import ConfigError, DeadlineExceeded
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.accept import Accept
from emergency_ckpt.transfer.security.handshake import SessionKeys, Terms, new_holder, seal
from emergency_ckpt.transfer.session import Service, Session
from emergency_ckpt.transfer.source import Holdings
from emergency_ckpt.transfer.stream import Stream
from emergency_ckpt.types import Security

_BACKLOG = 1024
_HANDSHAKE_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0


class TransferServer:
    """Listens on one named address; one thread per proved connection, ``max_connections`` at most.

    The address is bound at construction, so that other processes can be told it; connections are
    accepted from ``start`` until ``stop``. Those that have not proved the secret have places of
    their own (``entrance``). When all connections are in use, the one that has been idle longest is
    closed for a new one (its client reconnects); when none is idle, the new client is told that the
    server is busy.

    Attributes:
      address: ``host:port``.
      contact: ``holder@host:port``, with an identity drawn at construction. A client that has this
        text reaches this server or gets an error, never another server that took its port.

    Args:
      security: "aead" or "crc", which every client takes over in the handshake.
      io_timeout_s: maximum time in seconds of an idle connection, or a stall in a frame or piece.
      allow_all_interfaces: permits ``0.0.0.0`` and ``::``. With "crc" the bytes of shards
        can be read on the network.
      on_bytes_sent: called from the serving threads with the number of bytes of bodies sent.

    Raises ConfigError for an address that cannot be bound or a secret that is too short.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        run_id: str,
        secret: bytes,
        security: Security = "aead",
        bind_host: str = "127.0.0.1",
        port: int = 0,
        io_timeout_s: float = 30,
        max_connections: int = 64,
        allow_all_interfaces: bool = False,
        on_bytes_sent: Callable[[int], None] | None = None,
    ) -> None:
        credentials = Credentials(run_id, secret)
        self._service = Service(
            holdings=holdings,
            run_id=run_id,
            io_timeout_s=io_timeout_s,
            on_bytes_sent=on_bytes_sent or _ignore,
        )
        self._max_connections = max_connections
        self._listener, self.address = _bind(bind_host, port, allow_all_interfaces)
        drop_in_child(self._listener, socket.socket.close)
        self._terms = Terms(security, new_holder())
        self.contact = f"{self._terms.holder}@{self.address}"
        self._accept = Accept(
            self._listener,
            credentials,
            self._terms,
            timeout_s=min(_HANDSHAKE_TIMEOUT_S, io_timeout_s),
            on_proved=self._admit,
        )
        self._accepting: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._leaving: list[threading.Thread] = []  # finished their session, perhaps still running

    def start(self) -> None:
        """Begin to serve. Does not block. Call once. ConfigError when the port is taken."""
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                [f"transfer address {self.address}: {error}"], target="transfer server"
            ) from error
        self._accepting = threading.Thread(
            target=self._accept.run, name=f"transfer-server {self.address}", daemon=True
        )
        self._accepting.start()

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
        seal(stream, keys, self._terms.security, is_server=True)
        session = Session(stream, self._service)
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
        self._leaving = [each for each in self._leaving if each.is_alive()]
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


def _bind(host: str, port: int, allow_all_interfaces: bool) -> tuple[socket.socket, str]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, name = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            [f"transfer address {host!r}: {error}"], target="transfer server"
        ) from error
    everywhere = ipaddress.ip_address(str(name[0]).partition("%")[0]).is_unspecified
    try:
        if (everywhere or not host) and not allow_all_interfaces:
            raise ConfigError(
                [f"transfer address {host!r} means all interfaces: name the one that peers reach"],
                target="transfer server",
            )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(name)
    except ConfigError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise ConfigError(
            [f"transfer address {host!r} port {port}: {error}"], target="transfer server"
        ) from error
    bound_host, bound_port = listener.getsockname()[:2]
    return listener, format_address(
        socket.gethostname() if everywhere else str(bound_host), int(bound_port)
    )


def _ignore(_: int) -> None:
    return None
