"""A slow persistent save beside local saves at every step, which push host states too."""

from __future__ import annotations

import threading

import pytest
from world import LONG_S, World

from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.types import SaveId

SOON_S = 0.01
PEER = 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_peer_pushed_for_a_persistent_save_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    inboxes: list[HostStateInbox] = []
    make = HostStateInbox.__init__

    def noted(inbox: HostStateInbox) -> None:
        make(inbox)
        inboxes.append(inbox)

    begun, goes_on = threading.Event(), threading.Event()
    saves: list[SaveId] = []
    found: list[dict[int, bytes]] = []
    run = PersistentSaves.run

    def slow(persistent: PersistentSaves, job: PersistentSave) -> bool:
        saves.append(job.save)
        begun.set()
        assert goes_on.wait(LONG_S)
        found.append(inboxes[0].wait_for(job.save, [PEER], SOON_S))
        if fails:
            raise ZeroDivisionError
        return run(persistent, job)

    monkeypatch.setattr(HostStateInbox, "__init__", noted)
    monkeypatch.setattr(PersistentSaves, "run", slow)
    with world.open_both() as checkpointer:
        (inbox,) = inboxes
        checkpointer.save(step=2, state=world.state(2))
        assert begun.wait(LONG_S)
        (save,) = saves
        inbox.put(save, PEER, b"of step 2")
        for step in range(3, 20):
            inbox.put(SaveId(step, save.incarnation, save.run_id), PEER, b"of a local save")
        goes_on.set()
        checkpointer.wait_until_finished()
        assert found == [{PEER: b"of step 2"}]
        assert checkpointer.failed_saves == int(fails)
        # It is over, and keeps nothing any more.
        for step in range(20, 30):
            inbox.put(SaveId(step, save.incarnation, save.run_id), PEER, b"of a local save")
        with pytest.raises(Exception, match="not all came"):
            inbox.wait_for(save, [PEER], SOON_S)
