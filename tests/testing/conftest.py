"""One server for all tests of this folder, and one process for each real client."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcs_clients.worker import receive, send

from emergency_ckpt.testing.gcs import FakeGcs

CLIENTS_DIR = Path(__file__).parent / "gcs_clients"
BUCKET = "bucket"
CALL_TIMEOUT_S = 120.0


class ClientFailure(Exception):
    """The client raised; ``kind`` is the class of its error."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Client:
    """A real client in a process of its own. ``client.read(bucket, name)`` calls it there."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        path = os.pathsep.join([str(CLIENTS_DIR), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(CLIENTS_DIR / "worker.py"), f"ops_{name}"],
            env={**os.environ, **environment, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            # A call that hangs must end the test, not the test run.
            deadline = threading.Timer(CALL_TIMEOUT_S, self._process.kill)
            deadline.start()
            try:
                send(self._process.stdin, [function, arguments])
                reply = receive(self._process.stdout)
            finally:
                deadline.cancel()
            if "error" in reply:
                raise ClientFailure(reply["error"], reply["text"])
            return reply["value"]

        return call

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=[BUCKET], process=True) as gcs:
        yield gcs


@pytest.fixture
def gcs(server: FakeGcs) -> Iterator[FakeGcs]:
    """The shared server with an empty log and no faults; its objects stay, names are fresh."""
    server.clear_requests()
    yield server
    server.clear_faults()


@pytest.fixture(scope="session")
def start_client(server: FakeGcs) -> Iterator[Callable[[str], Client]]:
    """Makes client processes; those that tests share are found again by their name."""
    started: dict[str, Client] = {}
    extra: list[Client] = []

    def start(name: str, *, shared: bool = True) -> Client:
        if not shared:
            extra.append(Client(name, server.environment()))
            return extra[-1]
        if name not in started:
            started[name] = Client(name, server.environment())
        return started[name]

    yield start
    for client in (*started.values(), *extra):
        client.close()


@pytest.fixture(params=["tensorstore", "gcsfs", "storage"])
def client(request: pytest.FixtureRequest, start_client: Callable[[str], Client]) -> Client:
    return start_client(request.param)


@pytest.fixture(params=["gcsfs", "storage"])
def chunking_client(
    request: pytest.FixtureRequest, start_client: Callable[[str], Client]
) -> Client:
    """The clients that upload in several chunks; TensorStore never does."""
    return start_client(request.param)


_names = itertools.count()


@pytest.fixture
def name() -> str:
    """An object name, or the start of names, that no other test uses."""
    return f"t{next(_names)}"
