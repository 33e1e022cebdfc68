"""The inbox keeps what peers push for the newest saves to storage."""

from __future__ import annotations

import threading

import pytest

from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.types import SaveId

SOON_S = 0.01


def save_id(step: int) -> SaveId:
    return SaveId(step=step, incarnation="life", run_id="run")


def test_inbox_waits_for_all_and_names_who_is_missing() -> None:
    inbox = HostStateInbox()
    inbox.put(save_id(1), 0, b"zero")
    with pytest.raises(DeadlineExceeded, match="missing: process 2") as caught:
        inbox.wait_for(save_id(1), [0, 2], SOON_S)
    assert caught.value.missing == ("process 2",)
    thread = threading.Thread(target=inbox.put, args=(save_id(1), 2, b"two"))
    thread.start()
    assert inbox.wait_for(save_id(1), [0, 2], 60.0) == {0: b"zero", 2: b"two"}
    thread.join()
    assert inbox.wait_for(save_id(1), [], SOON_S) == {}


def test_inbox_keeps_the_newest_saves() -> None:
    inbox = HostStateInbox()
    for step in range(100):
        inbox.put(save_id(step), 1, b"of step %d" % step)
    assert inbox.wait_for(save_id(96), [1], SOON_S) == {1: b"of step 96"}
    with pytest.raises(DeadlineExceeded, match="missing: process 1"):
        inbox.wait_for(save_id(95), [1], SOON_S)
