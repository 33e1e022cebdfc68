"""The host state of a restore: only the document that the plan names is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers_support import open_tier, save_id, write_save

from emergency_ckpt.core.restore.plan_types import HostStateFetch
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.host_state import fetch_documents
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import CopiesFailed
from emergency_ckpt.state import host_state
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

SAVE = SaveId(7, "b-1", "run")
OTHER = SaveId(7, "a-1", "run")


def document(save: SaveId, at: int) -> bytes:
    return host_state.encode(save, 0, 1, host_state.capture({"at": at}))


class Ram:
    """A local tier with one document under the name of process 0, whatever it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes:
        return self._data


def fetch(data: bytes, wanted: str) -> list[Any]:
    fetches = (HostStateFetch(0, wanted, ("process/0",)),)
    client: Any = None
    sink = EventSink(None, process_index=0)
    calls = HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 5))
    tier: Any = Ram(data)
    room = RestoreRoom(tier, lack="")
    return fetch_documents(tier, calls, room, fetches, {}, SAVE, 1, "process/0", (0, 1))


class Peer:
    """A client of a peer that has ``documents`` by owner."""

    def __init__(self, documents: dict[int, bytes]) -> None:
        self._documents = documents

    def fetch_host_state(self, address: str, save: SaveId, owner: int, count: int) -> bytes:
        return self._documents[owner]


@pytest.fixture
def tier(ramdisk: Path) -> Iterator[LocalTier]:
    tier = open_tier(ramdisk)
    yield tier
    tier.close()


def remapped(tier: LocalTier, former: int) -> RestoreRoom:
    """Fetch the documents of ``former`` processes, as process 1 of 2; return the room for them."""
    save = save_id(7)
    documents = {
        owner: host_state.encode(save, owner, former, host_state.capture({"at": owner}))
        for owner in range(former)
    }
    fetches = [
        HostStateFetch(owner, host_state.decode(data).digest, ("process/0",))
        for owner, data in documents.items()
    ]
    client: Any = Peer(documents)
    holdings: Any = tier
    sink = EventSink(None, process_index=1)
    calls = HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 60))
    room = RestoreRoom(tier, lack="")
    addresses = {"process/0": "10.0.0.1:1"}
    found = fetch_documents(
        holdings, calls, room, fetches, addresses, save, former, "process/1", (1, 2)
    )
    assert [document.owner for document in found] == list(range(former))
    return room


def test_process_keeps_its_share_of_remapped_documents(tier: LocalTier) -> None:
    assert remapped(tier, 6).lack == ""
    assert [held.owner for held in tier.held()[1]] == [1, 3, 5]


def test_more_documents_than_ram_may_have_push_out_no_step(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is no lack of room: an older step may still be needed."""
    monkeypatch.setattr("emergency_ckpt.ram.process_directory.MAX_HOST_STATE_DOCUMENTS", 2)
    write_save(tier, 5)
    assert remapped(tier, 6).lack == ""
    assert [held.save.step for held in tier.held()[0]] == [5]
    assert [held.owner for held in tier.held()[1]] == [1, 3]


def test_document_that_the_plan_names_is_taken() -> None:
    data = document(SAVE, 7)
    (found,) = fetch(data, host_state.decode(data).digest)
    assert host_state.value_of(found.payload) == {"at": 7}


@pytest.mark.parametrize(("save", "at"), [(SAVE, 6), (OTHER, 7)], ids=["digest", "save"])
def test_document_of_another_digest_or_save_is_refused(save: SaveId, at: int) -> None:
    wanted = host_state.decode(document(SAVE, 7)).digest
    with pytest.raises(CopiesFailed) as failed:
        fetch(document(save, at), wanted)
    assert failed.value.problem == f"copies cannot be used: all of {wanted[:12]} at process/0"
