"""A server of forks: a process that imports what programs of tests need, and forks one per order.

``warm_start`` starts it, and orders. Started as a program, with the descriptors of its listening
socket and of a pipe that closes when the run of pytest has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

JOBS = Path(__file__).parent.parent / "jobs"

HEAD = struct.Struct("!I")
PID = struct.Struct("!i")
STATUS = struct.Struct("!i")
CPU = struct.Struct("!d")
REFUSED = 0
_IMPORTS = (
    "jax",
    "jax.experimental.multihost_utils",
    "ml_dtypes",
    "orbax.checkpoint",
    "tensorstore",
    "gcsfs",
    "google.cloud.storage",
    "grain",
    "emergency_ckpt.start",
    "emergency_ckpt.orbax",
    "emergency_ckpt.storage.tier",
    "emergency_ckpt.storage.step_writer",
    "emergency_ckpt.tools.simulated_job",
    "fake_gcs",
    "job_process",
)
_APPLIED = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
"""Variables of the interpreter that a fork can still follow."""


def address(name: str, server: int) -> str:
    """Return an abstract address: it has no file, and goes with the last process that has it."""
    return f"\0eckpt-test-{name}-{server}"


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the server of forks has ended")
        data += more
    return data


class _Fork:
    """A fork and who ordered it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        self.is_over = False
        self.is_abandoned = False

    def kill(self) -> None:
        """Kill its group, and itself, which may not lead one yet."""
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class _Server:
    def __init__(self, listener: socket.socket, life: int) -> None:
        self._listener = listener
        self._life = life
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(life, selectors.EVENT_READ)
        self._forks: set[_Fork] = set()
        self._environment = dict(os.environ)
        self._paths = list(sys.path)
        self._added: dict[str, str] | None = None

    def serve(self) -> Callable[[], None] | None:
        """Make forks until the run has ended; in a fork return what it is to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._life:
                    for fork in self._forks:
                        if not fork.is_over:
                            fork.kill()
                    return None
                if key.fileobj is self._listener:
                    task = self._accept()
                    if task is not None:
                        return task
                elif key.fileobj == key.data.descriptor:
                    self._tell_end(key.data)
                else:
                    self._hear(key.data)

    def _accept(self) -> Callable[[], None] | None:
        connection, _ = self._listener.accept()
        size = struct.calcsize("3i")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        assert struct.unpack("3i", peer)[1] == os.getuid()
        try:
            head, streams, _, _ = socket.recv_fds(connection, HEAD.size, 3)
            order = json.loads(read(connection, *HEAD.unpack(head)))
        except (ConnectionError, struct.error):  # who ordered has died
            connection.close()
            return None
        if _of_interpreter(order["environment"]) != _of_interpreter(self._environment):
            connection.sendall(PID.pack(REFUSED))
            connection.close()
        elif pid := self._fork():
            fork = _Fork(connection, pid)
            self._forks.add(fork)
            self._selector.register(fork.descriptor, selectors.EVENT_READ, fork)
            self._selector.register(connection, selectors.EVENT_READ, fork)
        else:
            self._close()
            return lambda: _become(order, streams, connection, self._added or {}, self._paths)
        for descriptor in streams:
            os.close(descriptor)
        return None

    def _fork(self) -> int:
        if self._added is None:
            self._added = _import_all(self._environment)
        return os.fork()

    def _close(self) -> None:
        """Close in a fork what is the server's; a later close would be of the program's files."""
        self._selector.close()
        self._listener.close()
        os.close(self._life)
        for fork in self._forks:
            fork.connection.close()
            if not fork.is_over:
                os.close(fork.descriptor)
        self._forks.clear()

    def _tell_end(self, fork: _Fork) -> None:
        self._selector.unregister(fork.descriptor)
        os.close(fork.descriptor)
        fork.is_over = True
        end = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if fork.is_abandoned:
            self._reap(fork)
            return
        with contextlib.suppress(ConnectionError):  # whose end will be heard
            fork.connection.sendall(STATUS.pack(status))

    def _hear(self, fork: _Fork) -> None:
        try:
            is_waited_for = bool(fork.connection.recv(1))
        except ConnectionError:
            is_waited_for = False
        self._selector.unregister(fork.connection)
        if fork.is_over:
            usage = self._reap(fork)
            if is_waited_for:
                with contextlib.suppress(ConnectionError):
                    fork.connection.sendall(CPU.pack(usage.ru_utime + usage.ru_stime))
        else:
            fork.is_abandoned = True
            fork.kill()
        fork.connection.close()

    def _reap(self, fork: _Fork) -> resource.struct_rusage:
        self._forks.remove(fork)
        return os.wait4(fork.pid, 0)[2]


def _of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what an interpreter reads at its start."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("PYTHON") and name not in _APPLIED
    }


def _import_all(environment: Mapping[str, str]) -> dict[str, str]:
    """Import what programs need; return the variables that imports have added."""
    sys.path.insert(0, str(JOBS))
    for name in _IMPORTS:
        importlib.import_module(name)
    assert threading.active_count() == 1
    # Orbax's import logs, which gives the root logger a handler. A program may ask for another; for
    # one that does not, its first message does the same again.
    logging.root.handlers.clear()
    # Each collection in a fork, and most of all that at its end, would search all that is imported:
    # a short program would spend most of its CPU there.
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if name not in environment}


# In a fork.


def _become(
    order: Mapping[str, Any],
    streams: Sequence[int],
    connection: socket.socket,
    added: Mapping[str, str],
    paths: Sequence[str],
) -> None:
    """Run the ordered program in this fork, as if it had been started by itself."""
    os.setsid()
    if order["registers"]:
        os.write(streams[0], b"+%d\n" % os.getpid())
    connection.sendall(PID.pack(os.getpid()))
    connection.close()
    for number, descriptor in enumerate(streams):
        if not (order["registers"] and number == 0):  # there it stays the server's: empty
            os.dup2(descriptor, number)
        os.close(descriptor)
    environment: dict[str, str] = order["environment"]
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update({**added, **environment})
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _configure_jax(environment)
    _configure_bucket_clients()
    _seed()
    program = Path(order["words"][0])
    sys.argv[:] = order["words"]
    sys.path[:] = [str(program.parent), *paths]
    main = types.ModuleType("__main__")
    main.__file__ = str(program)
    sys.modules["__main__"] = main
    exec(compile(program.read_bytes(), program, "exec"), main.__dict__)


def _configure_jax(environment: Mapping[str, str]) -> None:
    """Set what JAX reads from the environment when it is imported."""
    import jax  # noqa: PLC0415

    for name, text in environment.items():
        option = name.lower()
        if not name.startswith("JAX_") or option not in jax.config.values:
            continue
        kind = type(jax.config.values[option])
        value: Any = text
        if kind is bool:
            value = text.lower() in ("1", "true", "t", "yes", "y", "on")
        elif kind in (int, float):
            value = kind(text)
        jax.config.update(option, value)


def _configure_bucket_clients() -> None:
    """Set what fsspec and gcsfs read from the environment when they are imported."""
    from fsspec import config  # noqa: PLC0415

    config.conf.clear()
    config.set_conf_files(config.conf_dir, config.conf)
    config.set_conf_env(config.conf)
    # It chooses a class by the environment; its parts stay imported.
    del sys.modules["gcsfs"]
    importlib.import_module("gcsfs")


def _seed() -> None:
    """Give this fork random numbers of its own where Python does not."""
    import numpy  # noqa: PLC0415

    numpy.random.seed()


if __name__ == "__main__":
    task = _Server(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
    if task is not None:
        task()
