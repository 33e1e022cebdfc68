"""The start of the programs of ``tests/jobs`` as forks of processes that have imported JAX.

To import JAX, Orbax and this package takes a process longer than most programs run. ``install``
makes ``ProcessSet`` ask a server process of this test run for such a program; all other commands it
starts as ever. The fork is a process of its own in each respect that the launcher relies on: child
of this process, leader of its session, known to the janitor before the program runs. JAX is
configured, but not started, before the fork.

Two servers take turns by process index, so that the processes of a job do not all hash alike.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

JOBS = Path(__file__).parent.parent / "jobs"
_PATHS = (JOBS, Path(__file__).parent, JOBS.parents[1] / "verification")
COLD_VARIABLE = "ECKPT_TEST_COLD"
"""Set: every program starts its own interpreter."""

_IMPORTS = (
    "jax",
    "jax.experimental.multihost_utils",
    "ml_dtypes",
    "orbax.checkpoint",
    "tensorstore",
    "gcsfs",
    "google.cloud.storage",
    "emergency_ckpt.opening",
    "emergency_ckpt.orbax",
    "emergency_ckpt.storage.tier",
    "emergency_ckpt.storage.step_writer",
    "emergency_ckpt.tools.simulated_job",
    "fake_gcs",
    "job_process",
)
_SERVERS = 2
_LENGTH = struct.Struct("!I")
_PR_SET_CHILD_SUBREAPER = 36
_INDEX = "ECKPT_PROCESS_INDEX"


class WarmProcess:
    """A fork, with the part of ``subprocess.Popen`` that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, as ``Popen`` gives it; blocks."""
        assert timeout is None
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class _Server:
    """A process that has imported everything, and forks. One call at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        paths = os.pathsep.join(map(str, _PATHS))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )

    def fork(self, order: Mapping[str, Any], janitor: int, log: int) -> int:
        """Return the pid of a new child of this process that runs the order."""
        data = json.dumps(order).encode()
        libc = ctypes.CDLL(None, use_errno=True)
        # The fork's parent is a fork too, and ends: its child is given to this process.
        assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            socket.send_fds(self._socket, [_LENGTH.pack(len(data))], [janitor, log])
            self._socket.sendall(data)
            answer = _read(self._socket, _LENGTH.size)
        finally:
            assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
        return _LENGTH.unpack(answer)[0]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[int, _Server] = {}
_lock = threading.Lock()


def install() -> None:
    """Make the launcher of this process start the programs of ``tests/jobs`` by forks."""
    if COLD_VARIABLE in os.environ:
        return
    from emergency_ckpt.tools.launch import process_set  # noqa: PLC0415 - the servers need no launcher

    process_set.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_start, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )


def _start(command: Sequence[str], **options: Any) -> Any:
    program = list(command[4:])  # after the shell and its script
    environment = options.get("env", {})
    is_job = program[:1] == [sys.executable] and Path(*program[1:2]).parent == JOBS
    has_paths_of_its_own = environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
    if not is_job or has_paths_of_its_own:
        return subprocess.Popen(command, **options)
    order = {"arguments": program[1:], "environment": environment, "folder": os.getcwd()}
    number = int(environment[_INDEX]) % _SERVERS
    with _lock:
        if number not in _servers:
            _servers[number] = _Server()
            atexit.register(_servers[number].close)
        pid = _servers[number].fork(order, options["stdin"].fileno(), options["stdout"].fileno())
    return WarmProcess(pid)


# In the server and its forks.


def _serve(connection: socket.socket) -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    assert threading.active_count() == 1
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 2)
        if not head:
            return
        order = json.loads(_read(connection, _LENGTH.unpack(head)[0]))
        (pid_read, pid_write), (go_read, go_write) = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.read(go_read, 1)
            os.setsid()
            os.write(pid_write, _LENGTH.pack(os.getpid()))
            for descriptor in (pid_read, pid_write, go_read, go_write):
                os.close(descriptor)
            connection.close()
            _become(order, *descriptors)
            return
        os.waitpid(between, 0)  # now the child is the launcher's
        os.write(go_write, b".")
        connection.sendall(os.read(pid_read, _LENGTH.size))  # it leads its session
        for descriptor in (pid_read, pid_write, go_read, go_write, *descriptors):
            os.close(descriptor)


def _become(order: Mapping[str, Any], janitor: int, log: int) -> None:
    """Run the ordered program in this fork, as if it had been started by itself."""
    os.write(janitor, b"+%d\n" % os.getpid())
    os.close(janitor)
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    faulthandler.enable()
    _configure_jax(order["environment"])
    sys.argv = list(order["arguments"])
    runpy.run_path(sys.argv[0], run_name="__main__")


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


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the server of forks has ended")
        data += more
    return data


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
