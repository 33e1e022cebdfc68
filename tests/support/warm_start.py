"""The start of the programs of ``tests/jobs`` as forks of processes that have imported JAX.

To import JAX, Orbax and this package takes a process longer than most programs run. ``offer`` makes
two servers for a whole run of pytest, with all its workers; a server imports at its first order.
``start`` runs a program as a fork of one, and ``install`` makes the launcher do so. The fork is
like a process that was started by itself: leader of its session, with the environment, folder and
streams of the order, and JAX configured but not started. ``test_warm_start.py`` compares the two.
Python's collector leaves out what the server had imported, which has finalizers of no interest.

The server keeps an ended fork as a zombie until it was waited for, as the kernel does for a parent.
It kills the forks of a test process that has died, and all when the process that offered it dies.

Two servers take turns by process index, so that the processes of a job do not all hash alike.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import warm_server
from warm_server import CPU, HEAD, JOBS, PID, REFUSED, STATUS, address, read

COLD_VARIABLE = "ECKPT_TEST_COLD"
"""Set: every program starts its own interpreter."""
OFFER_VARIABLE = "ECKPT_TEST_WARM"
"""Names the sockets of this run's servers."""

_SERVERS = 2
_INDEX = "ECKPT_PROCESS_INDEX"
Streams = tuple[int, int, int]


class WarmProcess:
    """A fork, with the part of ``subprocess.Popen`` that the launcher and tests use."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, as ``Popen`` gives it, or None while the fork runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, as ``Popen`` gives it; blocks.

        Raises:
          subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the fork was found ended; until then no other has its number."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout_s: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and _is_readable(self._connection, timeout_s):
                (status,) = STATUS.unpack(read(self._connection, STATUS.size))
                self._connection.sendall(b".")
                _cpu_s.append(*CPU.unpack(read(self._connection, CPU.size)))
                self._connection.close()
                self.returncode = status
                _running.discard(self)
            return self.returncode


_running: set[WarmProcess] = set()
"""Forks that were not waited for: without their connection they would be killed."""
_cpu_s: list[float] = []
_servers: list[subprocess.Popen[bytes]] = []


def cpu_s() -> float:
    """Return the CPU time, user and system, of the forks that this process has waited for."""
    return sum(_cpu_s)


def servers() -> list[int]:
    """Return the process ids of the servers that this process has made."""
    return [server.pid for server in _servers]


def offer() -> None:
    """Make the servers of this run of pytest, unless its first process has: before its workers."""
    if COLD_VARIABLE in os.environ or OFFER_VARIABLE in os.environ:
        return
    name = secrets.token_hex(16)
    for number in range(_SERVERS):
        life, lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address(name, number))
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, "-P", warm_server.__file__, str(listener.fileno()), str(life)],
                pass_fds=[listener.fileno(), life],
                # JAX takes its settings from the environment of an order, and no other.
                env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(life)
        _servers.append(server)
        atexit.register(_end, server, lifeline)
    os.environ[OFFER_VARIABLE] = name


def _end(server: subprocess.Popen[bytes], lifeline: int) -> None:
    os.close(lifeline)
    server.wait()


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Streams,
    *,
    server: int = 0,
    registers: bool = False,
) -> WarmProcess | None:
    """Run a program of ``tests/jobs`` as a fork, or return None: it needs its own interpreter.

    Args:
      words: the program's path, and its arguments.
      environment: all of it.
      streams: standard input, output and error, which stay the caller's too.
      server: whose fork it is.
      registers: standard input is that of the launcher's janitor, to which the fork tells its
        process id; its own input is empty.
    """
    name = os.environ.get(OFFER_VARIABLE)
    is_cold = COLD_VARIABLE in environment or COLD_VARIABLE in os.environ
    if name is None or is_cold or not words or Path(words[0]).parent != JOBS:
        return None
    order = {
        "words": list(words),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "registers": registers,
    }
    data = json.dumps(order).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address(name, server % _SERVERS))
        socket.send_fds(connection, [HEAD.pack(len(data))], streams)
        connection.sendall(data)
        (pid,) = PID.unpack(read(connection, PID.size))
    except BaseException:
        connection.close()
        raise
    if pid == REFUSED:
        connection.close()
        return None
    process = WarmProcess(connection, pid)
    _running.add(process)
    return process


def install() -> None:
    """Make the launcher of this process start the programs of ``tests/jobs`` by forks."""
    from emergency_ckpt.tools.launch import process_set  # noqa: PLC0415 - the servers need no launcher

    process_set.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_start_in_job, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )


def _start_in_job(command: Sequence[str], **options: Any) -> Any:
    words = list(command[4:])  # after the shell and its script
    if words[:1] == [sys.executable]:
        environment = options["env"]
        log = options["stdout"].fileno()
        fork = start(
            words[1:],
            environment,
            (options["stdin"].fileno(), log, log),
            server=int(environment[_INDEX]),
            registers=True,
        )
        if fork is not None:
            return fork
    return subprocess.Popen(command, **options)


def _is_readable(connection: socket.socket, timeout_s: float | None) -> bool:
    watch = select.poll()
    watch.register(connection, select.POLLIN)
    return bool(watch.poll(None if timeout_s is None else 1000 * timeout_s))
