"""Start the processes of the comparison as forks of one that has imported the common modules.

Importing JAX and Orbax takes longer than most restores, is the same for all contenders, and took
half of the comparison's time. ``started`` runs the process that has imported them. ``command``
replaces the interpreter and the script in a command line, and runs the script in a fork, with its
own environment, standard output and exit status. JAX itself is not started before the fork.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_DIED = 1


@contextlib.contextmanager
def started(imports: tuple[str, ...], path: Path) -> Iterator[Path]:
    """Run a process that has imported ``imports`` from ``path``; yield its address.

    The process ends with the block, or with this process. RuntimeError when an import fails, whose
    reason is then on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="eckpt-warm-") as scratch:
        address = Path(scratch) / "socket"
        environment = {**os.environ, "PYTHONPATH": str(path)}
        command = [sys.executable, "-P", __file__, "serve", str(address), *imports]
        # The end of its standard input is the sign for it to end.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as server:
            assert server.stdout is not None
            if server.stdout.read(1) != b".":
                raise RuntimeError("the process to fork from did not come up")
            yield address


def command(address: Path, script: Path) -> tuple[str, ...]:
    """Return the command that starts ``script`` in a fork; the script's arguments follow it."""
    # Without site packages it starts in no time.
    return (sys.executable, "-I", "-S", __file__, "run", str(address), str(script))


def _serve(address: str, imports: list[str]) -> None:
    for name in imports:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else asks how a fork ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(sys.stdout.fileno(), b".")
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become(connection)
                return
            connection.close()


def _become(connection: socket.socket) -> None:
    """Run the requested script in the fork, as if it had been started by itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, (output, *_), _, _ = socket.recv_fds(connection, 1 << 16, 1)
    while more := connection.recv(1 << 16):
        data += more
    order = json.loads(data)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["environment"])
    faulthandler.enable()
    # Killed with the process that stands for it: the kernel signals the end of the connection.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    sys.argv = order["arguments"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody caught
        sys.excepthook(*sys.exc_info())
        status = 1
    else:
        status = 0
    connection.sendall(bytes([status & 0xFF]))


def _run(address: str, arguments: list[str]) -> int:
    """Represent the fork: return its status. The fork dies when this process is killed."""
    order = {"arguments": arguments, "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b" "], [sys.stdout.fileno()])
        connection.sendall(json.dumps(order).encode())
        connection.shutdown(socket.SHUT_WR)
        status = b""
        # Over only when the fork is gone, with all that it held.
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(1):
                status = more
    return status[0] if status else _DIED


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(_run(sys.argv[2], sys.argv[3:]))
