"""A way to storage for each process of its own, which counts the bytes that go through it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Generator
from concurrent.futures import Future
from urllib.parse import urlsplit

URLS_VARIABLE = "ECKPT_TEST_STORAGE_URLS"
"""Environment variable by which the processes of a job learn their ways, in order."""
_START_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 16


@dataclasses.dataclass
class Way:
    """Where one process finds storage, and what came through: all bytes of its TCP streams."""

    port: int = 0
    connections: int = 0
    to_storage_bytes: int = 0
    from_storage_bytes: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Proxy:
    def __init__(self, way: Way, storage_port: int) -> None:
        self.way = way
        self._storage_port = storage_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.way.connections += 1
        storage = await asyncio.open_connection("127.0.0.1", self._storage_port)
        await asyncio.gather(
            self._pass_on(reader, storage[1], "to_storage_bytes"),
            self._pass_on(storage[0], writer, "from_storage_bytes"),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str
    ) -> None:
        # Either end may reset; then the other sees the end of the stream, as without a proxy.
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                setattr(self.way, counter, getattr(self.way, counter) + len(data))
                writer.write(data)
                await writer.drain()
        writer.close()


async def _serve(ways: list[Way], storage_port: int, started: Future[asyncio.Event]) -> None:
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        for way in ways:
            proxy = _Proxy(way, storage_port)
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            way.port = server.sockets[0].getsockname()[1]
            stack.callback(server.close)
        started.set_result(stop)
        await stop.wait()


@contextlib.contextmanager
def ways_to(url: str, count: int) -> Generator[list[Way]]:
    """``count`` ways to the server at ``url``; their counts stay readable afterwards."""
    ways = [Way() for _ in range(count)]
    started: Future[asyncio.Event] = Future()
    loop = asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(ways, urlsplit(url).port or 80, started))

    thread = threading.Thread(target=run, name="counting-proxies", daemon=True)
    thread.start()
    stop = started.result(_START_TIMEOUT_S)
    try:
        yield ways
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_TIMEOUT_S)
