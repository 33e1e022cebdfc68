"""What a failed attempt of a restore leaves behind: no memory that the next save needs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from damage import flip
from world import World, save_all

from emergency_ckpt.errors import RestoreFailed
from emergency_ckpt.restore.shards import ShardCollection


@pytest.fixture
def no_collector() -> Iterator[None]:
    """As in trainers that turn Python's collector off: cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_failed_attempt_keeps_no_memory_without_the_collector(world: World) -> None:
    """The error of a damaged copy is in a reference cycle, and its frames had the shards."""
    with world.open_both() as saving:
        saving.restore(state=world.state(0))
        saving.save(step=2, state=world.state(2), force=True)
        saving.wait_until_finished()
    slots = list(world.ramdisk.rglob("slot_*.bin"))
    for slot in slots:
        for position in range(0, slot.stat().st_size, 512):
            flip(slot, position)
    assert slots
    with world.open_both() as restoring:
        step, _ = restoring.restore(state=world.state(0))
        assert step == 2
        assert world.named("restore.quarantined")
        assert world.named("restore.stage", stage="loaded")
        assert not [thing for thing in gc.get_objects() if isinstance(thing, ShardCollection)]


class _Broken:
    """An iterator that takes no state any more, not even its own."""

    def get_state(self) -> int:
        return 0

    def set_state(self, state: int) -> None:
        raise OSError("the data set is gone")


def test_iterator_that_takes_no_state_leaves_the_first_error(world: World) -> None:
    broken = _Broken()
    with world.open() as saving:
        saving.save(step=1, state=world.state(1), host_state=broken)
        saving.wait_until_finished()
    with world.open() as restoring:
        with pytest.raises(RestoreFailed, match=r"process 0: HostStateError: .*data set is gone"):
            restoring.restore(state=world.state(0), host_state=broken)
        assert world.named("restore.failed")
        (note,) = world.named("restore.note")
        assert "is not what it was before the restore" in str(note.fields["text"])


def test_restore_without_a_thread_for_its_beats_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "eckpt-beats":
            raise RuntimeError("can't start new thread")
        start(thread)

    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RestoreFailed, match="can't start new thread"):
            checkpointer.restore(state=world.state(0))
        monkeypatch.setattr(threading.Thread, "start", start)
        assert checkpointer.restore(state=world.state(0))[0] == 1
