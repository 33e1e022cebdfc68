"""A server in a process of its own: ``python -m fake_gcs BUCKET...`` prints its URL.

It ends when its stdin does, whose other end its parent holds: so also when the parent is killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from fake_gcs.control import FakeGcsError, GcsControl
from fake_gcs.server import GcsServer

_STOP_S = 15.0


async def serve(buckets: list[str]) -> None:
    """Serve until stdin ends."""
    server = GcsServer(buckets)
    print(await server.start(), flush=True)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await stop.wait()
    await server.stop()


class FakeGcs(GcsControl):
    """A GCS server for tests, which runs during the ``with`` block, in a process of its own.

    ``with FakeGcs(buckets=["b"]) as gcs:`` then ``gcs.url``, ``gcs.environment()``, and the
    methods of GcsControl. All data is in memory and is lost afterwards.
    """

    def __init__(self, *, buckets: list[str]) -> None:
        super().__init__("")
        self._buckets = buckets

    def __enter__(self) -> Self:
        """Start the server; block until it accepts requests. FakeGcsError when it ends instead."""
        path = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "fake_gcs", *self._buckets],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().decode().strip()
        if not self.url:
            raise FakeGcsError("start", "fake GCS", f"it ended, rc {self._child.wait()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server and discard its data; block until it has ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
