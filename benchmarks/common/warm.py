"""Start processes of the comparison by forking one that has imported what all contenders need.

Importing JAX and Orbax takes longer than most restores, and is nobody's merit: it was half of the
comparison's time. ``started`` runs the process that has done so; ``command`` is put in the place
of the interpreter and the script, and runs that in a fork of it: with its own environment,
standard output and exit status. JAX itself is not started before the fork.
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
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BOUND_BYTES = 1 << 20
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
_LENGTH = struct.Struct("!I")
_DIED = 1


@contextlib.contextmanager
def started(imports: tuple[str, ...], path: tuple[Path, ...]) -> Iterator[Path]:
    """The address of a process that has imported ``imports``; it ends with the block, or with us.

    TimeoutError when it does not come up; its words are on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="eckpt-warm-") as scratch:
        address = Path(scratch) / "socket"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-P", __file__, "serve", str(address), *imports]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            ready, _, _ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
            if not ready or server.stdout.read(1) != b".":
                raise TimeoutError("the process to fork from did not come up")
            yield address
        finally:
            server.stdin.close()  # its sign to end
            server.stdout.close()
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def command(address: Path, script: Path) -> tuple[str, ...]:
    """What starts ``script`` in a fork; its arguments follow."""
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
    """In the fork: run what was asked for, as if it had been started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(_END_TIMEOUT_S)
    head, (output, *_), _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    (length,) = _LENGTH.unpack(head)
    if length > _BOUND_BYTES:
        raise ValueError(f"{length} bytes of orders")
    with connection.makefile("rb") as stream:
        order = json.loads(stream.read(length))
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
    """Stands for the fork: has its status, and takes it along when it is killed."""
    order = {"arguments": arguments, "environment": dict(os.environ)}
    data = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [_LENGTH.pack(len(data))], [sys.stdout.fileno()])
        connection.sendall(data)
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
