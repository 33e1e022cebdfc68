"""A server on loopback with holdings in memory, and clients that know its secret."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_holdings import MemoryHoldings
from transfer_support import RUN_ID, SECRET

from emergency_ckpt.transfer import TransferClient, TransferServer


@pytest.fixture
def holdings() -> MemoryHoldings:
    return MemoryHoldings()


@pytest.fixture
def server(holdings: MemoryHoldings) -> Iterator[TransferServer]:
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=60) as server:
        yield server


@pytest.fixture
def client() -> Iterator[TransferClient]:
    with TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=60, io_timeout_s=60) as c:
        yield c
