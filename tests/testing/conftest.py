"""The server under test, and the real clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from fake_gcs import FakeGcs
from gcs_real_clients import BUCKET, Client


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
