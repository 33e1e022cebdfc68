"""The network between simulated hosts: ``socket`` and ``selectors`` over pipes in memory.

A connection has two pipes. Bytes arrive in pieces whose sizes the seed decides. A fault makes a
connection reset, or silent: what is sent is lost and nothing comes.
"""

from __future__ import annotations

import errno
import itertools
import selectors as real_selectors
import socket as real_socket
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import sim
from scheduler import Task

_CAPACITY_BYTES = 1 << 20


class Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.reset = False
        self.silent = False
        self.waiting: list[Task] = []
        self.watchers: list[Callable[[], None]] = []

    def changed(self) -> None:
        """Wake all that wait for this pipe."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            sim.scheduler.wake(task)
        for watcher in self.watchers:
            watcher()

    def wait(self, timeout_s: float | None) -> None:
        """Block until something changes; TimeoutError."""
        if not sim.scheduler.wait_among(self.waiting, timeout_s):
            raise TimeoutError("timed out")


class Network:
    """All listeners and connections of one simulation."""

    def __init__(self, first_fd: int = 1_000_000) -> None:
        self.listeners: dict[tuple[str, int], Socket] = {}
        self.by_fd: dict[int, Socket] = {}
        self.fds = itertools.count(first_fd)
        self.ports = itertools.count(20_000)
        self.fault: Callable[[Socket], str] = lambda _: ""
        """Asked before each transfer; returns "", "reset", "silent" or "slow"."""

    def drop(self, process: Any) -> None:
        """Close what a killed process had open: its peers see a reset or the end."""
        for sock in list(self.by_fd.values()):
            if sock.process is process:
                sock.tear_down()

    def forget_all_but(self, process: Any) -> None:
        """Keep the connections of ``process``, which goes on without its peers."""
        self.by_fd = {fd: sock for fd, sock in self.by_fd.items() if sock.process is process}


network = Network()


def begin(life: int) -> Network:
    """Make a new network the current one; its descriptors differ from those of other lives."""
    global network  # noqa: PLW0603 - one simulation at a time
    left = network.by_fd if life > 1 else {}
    network = Network(1_000_000 * (life + 1))
    network.by_fd.update(left)
    return network


class Socket:
    """``socket.socket`` of TCP."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.fd = next(network.fds)
        self.timeout: float | None = None
        self.incoming: Pipe | None = None
        self.outgoing: Pipe | None = None
        self.backlog: list[Socket] | None = None
        self.listening = Pipe()
        self.address: tuple[str, int] = ("", 0)
        self.peer: tuple[str, int] = ("", 0)
        self.closed = False
        task = sim.scheduler.current
        self.process = None if task is None else task.process
        network.by_fd[self.fd] = self

    # Set-up.

    def setsockopt(self, *_: Any) -> None: ...

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def setblocking(self, blocking: bool) -> None:
        self.timeout = None if blocking else 0

    def fileno(self) -> int:
        return -1 if self.closed else self.fd

    def bind(self, address: tuple[str, int]) -> None:
        host, port = address[:2]
        self.address = (host, port or next(network.ports))

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def listen(self, _backlog: int = 0) -> None:
        if self.address in network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.backlog = []
        network.listeners[self.address] = self

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        sim.scheduler.check()
        if self.closed or self.listening.ended:
            raise OSError(errno.EINVAL, "Invalid argument")
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self.backlog.pop(0)
        sock.process = self.process
        return sock, sock.peer

    # Bytes.

    def _fault(self) -> None:
        kind = network.fault(self)
        if kind == "reset":
            self._reset()
        elif kind == "silent":
            for pipe in (self.incoming, self.outgoing):
                if pipe is not None:
                    pipe.silent = True
        elif kind == "slow":
            sim.scheduler.sleep(sim.scheduler.random.uniform(0.1, 5.0))

    def _reset(self) -> None:
        for pipe in (self.incoming, self.outgoing):
            if pipe is not None:
                pipe.reset = True
                pipe.changed()

    def send(self, data: Any) -> int:
        scheduler = sim.scheduler
        scheduler.call(scheduler.random.random() * 0.002)
        self._fault()
        pipe = self._open(self.outgoing)
        data = memoryview(data).cast("B")
        if pipe.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if pipe.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if pipe.silent:
            return len(data)
        if len(pipe.data) + len(data) > _CAPACITY_BYTES:
            pipe.wait(self.timeout)
        pipe.data += data
        pipe.changed()
        return len(data)

    def sendall(self, data: Any) -> None:
        self.send(data)

    def recv_into(self, view: Any, nbytes: int = 0, flags: int = 0) -> int:
        data = self._receive(nbytes or len(view), flags)
        memoryview(view).cast("B")[: len(data)] = data
        return len(data)

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        return self._receive(nbytes, flags)

    def _receive(self, nbytes: int, flags: int) -> bytes:
        scheduler = sim.scheduler
        scheduler.check()
        pipe = self._open(self.incoming)
        if self.timeout != 0:
            scheduler.call()
            self._fault()
        deadline_s = None if self.timeout is None else scheduler.now_s + self.timeout
        while True:
            if pipe.reset:
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            if pipe.data and not pipe.silent:
                break
            if pipe.ended and not pipe.silent:
                return b""
            if self.timeout == 0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            left_s = None if deadline_s is None else deadline_s - scheduler.now_s
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            pipe.wait(left_s)
        count = min(nbytes, len(pipe.data))
        if count > 1 and scheduler.random.random() < 0.05:
            count = 1 + int(scheduler.random.random() * (count - 1))
        data = bytes(pipe.data[:count])
        if not flags & real_socket.MSG_PEEK:
            del pipe.data[:count]
            pipe.changed()
        return data

    def _open(self, pipe: Pipe | None) -> Pipe:
        if self.closed or pipe is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return pipe

    def readable(self) -> bool:
        """Return whether a receive or an accept would not block."""
        if self.backlog is not None or self.listening.ended:
            return bool(self.backlog) or self.listening.ended
        pipe = self.incoming
        if pipe is None:
            return False
        return pipe.reset or (not pipe.silent and (bool(pipe.data) or pipe.ended))

    def pipe_to_watch(self) -> Pipe:
        """Return the pipe whose change may make this readable."""
        return self.incoming if self.incoming is not None else self.listening

    # The end.

    def shutdown(self, how: int) -> None:
        if self.backlog is not None:
            self.listening.ended = True
            network.listeners.pop(self.address, None)
            self.listening.changed()
            return
        if self.incoming is None or self.outgoing is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self.outgoing.ended = True
        self.outgoing.changed()
        if how == real_socket.SHUT_RDWR:
            self.incoming.ended = True
            self.incoming.changed()

    def tear_down(self) -> None:
        """Close without a point, as the kernel does for a process that ends."""
        if self.closed:
            return
        self.closed = True
        network.by_fd.pop(self.fd, None)
        if self.backlog is not None:
            network.listeners.pop(self.address, None)
            self.listening.ended = True
            self.listening.changed()
            for sock in self.backlog:
                sock.tear_down()
        if self.outgoing is not None:
            self.outgoing.ended = True
            self.outgoing.changed()
        if self.incoming is not None:
            if self.incoming.data and self.outgoing is not None:
                self.outgoing.reset = True  # unread bytes: the peer sees a reset
                self.outgoing.changed()
            self.incoming.ended = True
            self.incoming.changed()

    close = tear_down

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_connection(address: tuple[str, int], timeout: float | None = None) -> Socket:
    """Return a connection to a listener; ConnectionRefusedError, TimeoutError."""
    scheduler = sim.scheduler
    scheduler.call(scheduler.random.random() * 0.002)
    sock = Socket()
    kind = network.fault(sock)
    if kind == "silent":
        scheduler.sleep(timeout or 75.0)
        raise TimeoutError("timed out")
    listener = network.listeners.get((address[0], address[1]))
    if listener is None or listener.backlog is None or kind == "reset":
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    here, there = Pipe(), Pipe()
    other = Socket()
    other.process = listener.process
    host = scheduler.here().process.host
    sock.incoming, sock.outgoing = here, there
    other.incoming, other.outgoing = there, here
    sock.peer, other.peer = address, (host.address, next(network.ports))
    sock.timeout = timeout
    listener.backlog.append(other)
    listener.listening.changed()
    return sock


class Selector:
    """``selectors.DefaultSelector``, for reading."""

    def __init__(self) -> None:
        self._socks: dict[int, Any] = {}
        self._waiting: Task | None = None

    def register(self, sock: Socket, _events: int) -> None:
        self._socks[sock.fd] = types.SimpleNamespace(fileobj=sock, fd=sock.fd)
        sock.pipe_to_watch().watchers.append(self._wake)

    def unregister(self, sock: Socket) -> None:
        del self._socks[sock.fd]
        watchers = sock.pipe_to_watch().watchers
        if self._wake in watchers:
            watchers.remove(self._wake)

    def _wake(self) -> None:
        if self._waiting is not None:
            sim.scheduler.wake(self._waiting)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        scheduler = sim.scheduler
        scheduler.point()
        found = self._found()
        if not found:
            self._waiting = scheduler.here()
            try:
                scheduler.block(timeout)
            finally:
                self._waiting = None
            found = self._found()
        return found

    def _found(self) -> list[tuple[Any, int]]:
        keys = [key for key in self._socks.values() if key.fileobj.readable()]
        sim.scheduler.random.shuffle(keys)
        return [(key, real_selectors.EVENT_READ) for key in keys]

    def close(self) -> None:
        self._socks.clear()


def socket_module() -> ModuleType:
    """Return the module that stands for ``socket``."""
    module = ModuleType("socket")
    vars(module).update(vars(real_socket))
    kind, protocol = real_socket.SOCK_STREAM, real_socket.IPPROTO_TCP

    def getaddrinfo(host: str | None, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(real_socket.AF_INET, kind, protocol, "", (host or "0.0.0.0", port))]

    vars(module).update(
        socket=Socket,
        create_connection=create_connection,
        getaddrinfo=getaddrinfo,
        gethostname=lambda: sim.scheduler.here().process.host.name,
    )
    return module


def selectors_module() -> ModuleType:
    """Return the module that stands for ``selectors``."""
    module = ModuleType("selectors")
    vars(module).update(vars(real_selectors))
    vars(module).update(DefaultSelector=Selector)
    return module
