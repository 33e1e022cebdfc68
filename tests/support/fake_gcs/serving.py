"""Ways to run a server: in a thread of this process, in its own process, in the foreground."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from fake_gcs.control import FakeGcsError, GcsControl
from fake_gcs.resources import GcsError, Limits
from fake_gcs.server import GcsServer

_STOP_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The options of a server; ``port`` 0 chooses a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    buckets: tuple[str, ...] = ()
    io_timeout_s: float = 60.0
    limits: Limits = field(default_factory=Limits)


async def serve(
    options: ServeOptions, stop: asyncio.Event, on_start: Callable[[str], None]
) -> None:
    """Serve until ``stop`` is set. Calls ``on_start`` with the URL once it accepts requests.

    FakeGcsError when the address cannot be bound or a bucket's name is invalid.
    """
    server = GcsServer(options.limits, io_timeout_s=options.io_timeout_s)
    try:
        for bucket in options.buckets:
            server.create_bucket(bucket)
        url = await server.start(options.host, options.port)
    except (OSError, GcsError) as error:
        address = f"fake GCS on {options.host}:{options.port}"
        raise FakeGcsError("start", address, str(error)) from error
    try:
        on_start(url)
        await stop.wait()
    finally:
        await server.stop()


def serve_in_foreground(options: ServeOptions, on_start: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, or until stdin ends. Blocks."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)

        # The parent holds the other end, which also closes when the parent is killed.
        def wait_for_end() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, daemon=True).start()
        await serve(options, stop, on_start)

    asyncio.run(run())


class FakeGcs(GcsControl):
    """A GCS server for tests, which runs during the ``with`` block.

    ``with FakeGcs(buckets=["b"]) as gcs:`` then ``gcs.url``, ``gcs.environment()``, and the
    methods of GcsControl. All data is in memory and is lost afterwards.

    Args:
      buckets: made before the first request.
      process: run in its own process instead of a thread. Better when this process is busy, since
        a thread shares the interpreter lock with it. It ends when this process ends.
      port: 0 chooses a free one.
      limits: bounds of the store and the log.
      start_timeout_s: maximum time in seconds until it listens.

    Raises FakeGcsError from ``start`` when it does not start.
    """

    def __init__(
        self,
        *,
        buckets: tuple[str, ...] | list[str] = (),
        process: bool = False,
        port: int = 0,
        limits: Limits | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        super().__init__("")
        self._options = ServeOptions(port=port, buckets=tuple(buckets), limits=limits or Limits())
        self._in_process = process
        self._start_timeout_s = start_timeout_s
        self._started: queue.Queue[str | Exception] = queue.Queue()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._end_thread: Callable[[], None] | None = None

    def start(self) -> Self:
        """Start the server; block until it accepts requests."""
        if self._in_process:
            self._start_child()
        else:
            self._thread = threading.Thread(target=self._run, name="fake-gcs", daemon=True)
            self._thread.start()
        try:
            outcome = self._started.get(timeout=self._start_timeout_s)
        except queue.Empty as error:
            self.stop()
            raise FakeGcsError(
                "start", "fake GCS", f"not listening after {self._start_timeout_s:g} s"
            ) from error
        if isinstance(outcome, Exception):
            self.stop()
            if isinstance(outcome, FakeGcsError):
                raise outcome
            raise FakeGcsError("start", "fake GCS", repr(outcome)) from outcome
        self.url = outcome
        return self

    def stop(self) -> None:
        """End the server and discard its data; block until it has ended. Idempotent."""
        if self._end_thread is not None:
            self._end_thread()
            self._end_thread = None
        if self._thread is not None:
            self._thread.join(timeout=_STOP_S)
            self._thread = None
        if self._child is not None:
            self._stop_child(self._child)
            self._child = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            def end() -> None:
                loop.call_soon_threadsafe(stop.set)

            self._end_thread = end
            await serve(self._options, stop, self._started.put)

        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - whatever it is, the starter must hear of it
            self._end_thread = None  # its loop is closed
            self._started.put(error)

    def _start_child(self) -> None:
        options = msgspec.json.encode(self._options).decode()
        path = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "fake_gcs", options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._read_url, args=(self._child,), daemon=True).start()

    def _read_url(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        line = child.stdout.readline().decode().strip()
        if line.startswith("http://"):
            self._started.put(line)
        else:
            problem = line or f"the server process ended, rc {child.wait()}"
            self._started.put(FakeGcsError("start", "fake GCS", problem))

    @staticmethod
    def _stop_child(child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
