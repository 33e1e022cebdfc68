"""Host states that peers push to a process whose ramdisk is full, for either tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from served_tiers import later, open_tier
from transfer_support import RUN_ID, SAVE, SECRET

from emergency_ckpt.cluster import ProcessHoldings
from emergency_ckpt.errors import DeadlineExceeded, RamdiskFull, TransferError
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.state import host_state
from emergency_ckpt.transfer import TransferClient, TransferServer
from emergency_ckpt.types import SaveId

SOON_S = 0.01


class Full(NamedTuple):
    """A process with a full ramdisk, and a client of another one."""

    holdings: ProcessHoldings
    address: str
    client: TransferClient

    def held(self) -> dict[int, bytes]:
        return self.holdings.inbox.wait_for(SAVE, [1], SOON_S)


def document(save: SaveId = SAVE, owner: int = 1) -> bytes:
    return host_state.encode(save, owner, 2, host_state.capture({"at": 8}))


@pytest.fixture
def full(ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    def refuse(*_: object) -> None:
        raise RamdiskFull("write", "process_00001_of_00002.json", "no space left")

    monkeypatch.setattr(LocalTier, "publish_host_state", refuse)
    tier = open_tier(ramdisk)
    holdings = ProcessHoldings(tier, 0)
    client = TransferClient(run_id=RUN_ID, secret=SECRET)
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET, bind_host="127.0.0.1") as server:
        yield Full(holdings, server.address, client)
    client.close()
    tier.close()


def test_push_for_storage_needs_no_room_in_ram(full: Full) -> None:
    full.client.push_host_state(full.address, SAVE, 1, 2, document(), for_storage=True)
    assert full.held() == {1: document()}


def test_push_for_ram_is_refused_when_there_is_no_room(full: Full) -> None:
    with pytest.raises(TransferError, match="no space left"):
        full.client.push_host_state(full.address, SAVE, 1, 2, document())
    with pytest.raises(DeadlineExceeded):
        full.held()


@pytest.mark.parametrize(
    "data", [b"{}", document(owner=0), document(later(9))], ids=["none", "owner", "step"]
)
def test_push_for_storage_of_another_document_is_refused(full: Full, data: bytes) -> None:
    with pytest.raises(TransferError, match="refused"):
        full.client.push_host_state(full.address, SAVE, 1, 2, data, for_storage=True)
    with pytest.raises(DeadlineExceeded):
        full.held()
