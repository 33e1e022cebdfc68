"""The server under test, and the real clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from fake_gcs import FakeGcs
from gcs_real_clients import BUCKET, Client


@pytest.fixture(scope="session")
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=[BUCKET]) as gcs:
        yield gcs


@pytest.fixture
def gcs(server: FakeGcs) -> Iterator[FakeGcs]:
    """The shared server with an empty log and no faults; its objects stay, names are fresh."""
    server.clear_requests()
    yield server
    server.clear_faults()


@pytest.fixture(scope="session")
def start_client(server: FakeGcs) -> Iterator[Callable[[str], Client]]:
    """Makes client processes; they are found again by their name."""
    started: dict[str, Client] = {}

    def start(name: str) -> Client:
        if name not in started:
            started[name] = Client(name.partition(" ")[0], server.environment())
        return started[name]

    yield start
    for client in started.values():
        client.close()


@pytest.fixture(params=["tensorstore", "gcsfs"])
def client(request: pytest.FixtureRequest, start_client: Callable[[str], Client]) -> Client:
    return start_client(request.param)


_names = itertools.count()


@pytest.fixture
def name() -> str:
    """An object name, or the start of names, that no other test uses."""
    return f"t{next(_names)}"
