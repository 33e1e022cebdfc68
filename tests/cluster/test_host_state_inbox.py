"""What peers push for a persistent save stays while local saves go on, and the rest is bounded."""

from __future__ import annotations

import threading

import pytest

from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.types import SaveId

SOON_S = 0.01
MANY = range(1000, 1100)


def save_id(step: int) -> SaveId:
    return SaveId(step=step, incarnation="life", run_id="run")


def push(inbox: HostStateInbox, *steps: int) -> None:
    for step in steps:
        inbox.put(save_id(step), 1, b"of step %d" % step)


def held(inbox: HostStateInbox, *steps: int) -> list[int]:
    found: list[int] = []
    for step in steps:
        try:
            assert inbox.wait_for(save_id(step), [1], SOON_S) == {1: b"of step %d" % step}
        except DeadlineExceeded:
            continue
        found.append(step)
    return found


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


@pytest.mark.parametrize("pushed_first", [True, False])
def test_kept_save_outlives_any_number_of_others(*, pushed_first: bool) -> None:
    inbox = HostStateInbox()
    if pushed_first:
        push(inbox, 100)
    with inbox.kept(save_id(100)):
        if not pushed_first:
            push(inbox, 101, 100)
        push(inbox, *MANY)
        assert held(inbox, 100) == [100]
        assert held(inbox, *MANY) == [*MANY][-4:], "it takes the room of no other one"
