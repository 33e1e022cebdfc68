"""After a restore each process gives its buddies a copy again; what fails there is reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_coordination import tell_address
from tiers_support import open_tier

from emergency_ckpt.cluster.coordination import LocalCoordinator
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.errors import CoordinationError
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.restore.host_state import HostStateRestore
from emergency_ckpt.state.host_state import capture, encode
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import SaveId

SAVE = SaveId(7, "0" * 32, "run")


class WithoutService(LocalCoordinator):
    """Knows what it was told, and fails for the rest as the service does while it is away."""

    def get(self, key: str, timeout_s: float) -> bytes:
        if key not in self._values:
            raise CoordinationError("get", key, "UNAVAILABLE: the service is away")
        return super().get(key, timeout_s)


def test_unreachable_buddies_are_each_reported_and_end_nothing(ramdisk: Path) -> None:
    events: list[Event] = []
    coordinator = WithoutService()
    tell_address(coordinator, 1, "127.0.0.1:1")  # nobody listens there; of 2 nothing is known
    tier = open_tier(ramdisk, run_id=SAVE.run_id, process_count=3)
    client = TransferClient(run_id=SAVE.run_id, secret=b"s" * 32)
    try:
        document = encode(SAVE, 0, 3, capture({"epoch": 3}))
        tier.publish_host_state(SAVE, 0, 3, document)
        sink = EventSink(events.append, process_index=0)
        parts: Any = SimpleNamespace(
            holdings=ProcessHoldings(tier, 0),
            peers=Peers(coordinator, client),
            events=sink,
            process=(0, 3),
        )
        restored = HostStateRestore(parts, None, [2, 1])
        restored.apply(SAVE, [])
        restored.finish()
    finally:
        client.close()
    assert {(event.name, event.fields["role"]) for event in events} == {
        ("restore.peer_unreachable", "buddy")
    }
    assert [event.fields["peer"] for event in events] == ["process/2", "process/1"]


def test_host_state_is_pushed_where_no_thread_can_be_started(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, work: object) -> object:
        raise RuntimeError(f"can't start new thread {name}")

    monkeypatch.setattr("emergency_ckpt.restore.host_state.run_in_thread", refused)
    test_unreachable_buddies_are_each_reported_and_end_nothing(ramdisk)
