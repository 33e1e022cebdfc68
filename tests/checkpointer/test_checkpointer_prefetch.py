"""A prefetch in a job of one process: what it brings, and all that may come between."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from world import LONG_S, World, same, save_all

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError, StateMismatch, StepNotFound
from emergency_ckpt.events import Event


class Gate:
    """A listener that keeps the thread of one event until it is let go."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, event: Event) -> None:
        self._world.events.append(event)
        if event.name == self._name and not self._open.is_set():
            self._reached.set()
            assert self._open.wait(LONG_S)

    def wait(self) -> None:
        assert self._reached.wait(LONG_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def saved(world: World) -> World:
    """A world in which steps 1 and 2 were saved to RAM, and step 2 to storage."""
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2)
    world.events.clear()
    return world


def specs(world: World) -> dict[str, Any]:
    def spec(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(spec, world.state(0))


def wait_for(world: World, name: str) -> None:
    poll = threading.Event()
    for _ in range(int(LONG_S * 100)):
        if name in world.names():
            return
        poll.wait(0.01)
    raise AssertionError(f"{name} did not come: {world.names()}")


def unused(world: World) -> list[Any]:
    return [e.fields["reason"] for e in world.events if e.name == "prefetch.unused"]


def check(checkpointer: EmergencyCheckpointer, world: World, step: int) -> dict[str, Any]:
    host = {"at": 0}
    found, state = checkpointer.restore(state=specs(world), host_state=host)
    assert found == step
    assert same(state, world.state(step))
    assert host == {"at": step}
    return state


@pytest.mark.parametrize("from_storage", [False, True], ids=["RAM", "storage"])
def test_restore_finds_what_was_prefetched(saved: World, from_storage: bool) -> None:
    if from_storage:
        saved.lose_ram()
    with saved.open_both() as checkpointer:
        checkpointer.prefetch(specs(saved))
        wait_for(saved, "prefetch.finished")
        before = saved.names()
        assert "restore.fetched" in before
        assert "restore.started" not in before
        check(checkpointer, saved, 2)
        after = saved.names()[len(before) :]
        assert {"restore.started", "restore.finished"} <= set(after)
        assert not {"restore.planned", "restore.loaded", "restore.fetched"} & set(after)
        report = checkpointer.last_restore
        assert report is not None
        assert report.tier == ("persistent" if from_storage else "local")
        assert report.bytes_local + report.bytes_persistent == 128 + 4 + 8
        assert report.overlapped_seconds > 0
        save_all(checkpointer, saved, 3, 4)
        check(checkpointer, saved, 4)
        report = checkpointer.last_restore
        assert report is not None
        assert report.overlapped_seconds == 0


def test_restore_waits_for_a_prefetch_that_is_under_way(saved: World) -> None:
    gate = Gate(saved, "restore.planned")
    with saved.open(on_event=gate) as checkpointer:
        checkpointer.prefetch(specs(saved))
        gate.wait()
        threading.Timer(0.1, gate.open).start()
        check(checkpointer, saved, 2)
        assert saved.names().count("restore.planned") == 1
        assert unused(saved) == []


def test_host_state_moves_in_restore_alone(saved: World) -> None:
    class Position:
        at = 0

        def get_state(self) -> int:
            return self.at

        def set_state(self, state: int) -> None:
            self.at = state

    position = Position()
    with saved.open() as checkpointer:
        save_all(checkpointer, saved, 3)
        checkpointer.save(step=4, state=saved.state(4), host_state={"it": Position()})
        checkpointer.wait_until_finished()
    position.at = 9
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        wait_for(saved, "prefetch.finished")
        assert position.at == 9
        with pytest.raises(CheckpointError, match="host_state"):
            checkpointer.restore(state=specs(saved), host_state={"other": position})
        assert position.at == 9
        # That one took the prefetch with it; this is an ordinary restore.
        assert checkpointer.restore(state=specs(saved), host_state={"it": position})[0] == 4
        assert position.at == 0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"step": 1}, "step None was prefetched, not 1"),
        ({"host_state": None}, "with host state and without"),
    ],
)
def test_another_request_is_an_ordinary_restore(
    saved: World, asked: dict[str, Any], reason: str
) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        arguments = {"state": specs(saved), "host_state": {}, **asked}
        step, state = checkpointer.restore(**arguments)
        assert step == arguments.get("step", 2)
        assert same(state, saved.state(step or 0))
        (told,) = unused(saved)
        assert reason in told


def test_another_sharding_is_an_ordinary_restore(saved: World) -> None:
    other = {**specs(saved), "w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    with saved.open() as checkpointer:
        checkpointer.prefetch(other)
        check(checkpointer, saved, 2)
        (told,) = unused(saved)
        assert "another state was prefetched" in told


def test_nothing_there_is_a_fresh_start(world: World) -> None:
    with world.open() as checkpointer:
        checkpointer.prefetch(specs(world))
        wait_for(world, "prefetch.nothing")
        given = specs(world)
        step, state = checkpointer.restore(state=given)
        assert step is None
        assert state is given


def test_error_is_told_by_the_next_restore_and_once(saved: World) -> None:
    wrong = {**specs(saved), "w": jnp.zeros((8, 5))}
    with saved.open() as checkpointer:
        checkpointer.prefetch(wrong)
        wait_for(saved, "prefetch.failed")
        checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        with pytest.raises(StateMismatch, match=r"\(8, 5\)"):
            checkpointer.restore(state=specs(saved))
        check(checkpointer, saved, 3)
        checkpointer.prefetch(specs(saved), step=17)
        with pytest.raises(StepNotFound):
            checkpointer.restore(step=17, state=specs(saved), host_state={})
        check(checkpointer, saved, 3)


@pytest.mark.parametrize("point", ["restore.planned", "restore.fetched", None])
def test_save_before_the_restore_comes_first(saved: World, point: str | None) -> None:
    """Also one that meets the prefetch in the middle of its work."""
    gate = Gate(saved, point or "")
    with saved.open(on_event=gate) as checkpointer:
        checkpointer.prefetch(specs(saved))
        if point is None:
            wait_for(saved, "prefetch.finished")
        else:
            gate.wait()
        assert checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        assert "save.published" not in saved.names() or point is None
        gate.open()
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
        assert "save.complete" in saved.names()
        check(checkpointer, saved, 3)
        (told,) = unused(saved)
        assert "step 3 was saved before the restore" in told
        save_all(checkpointer, saved, 4)
        checkpointer.prefetch(specs(saved))
        check(checkpointer, saved, 4)


def test_prefetch_waits_for_the_save_under_way(saved: World) -> None:
    gate = Gate(saved, "save.copied")
    with saved.open(on_event=gate) as checkpointer:
        assert checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        gate.wait()
        checkpointer.prefetch(specs(saved))
        gate.open()
        check(checkpointer, saved, 3)
        assert unused(saved) == []


def test_memory_that_a_prefetch_lent_comes_back(saved: World) -> None:
    def slots() -> int:
        return len(list(saved.ramdisk.rglob("slot_*.bin")))

    with saved.open() as checkpointer:
        for step in range(3, 9):
            checkpointer.prefetch(specs(saved))
            # Every other one is not used: another step is asked for, in words.
            asked = step - 1 if step % 2 else None
            found, state = checkpointer.restore(asked, state=specs(saved), host_state={})
            assert found == step - 1
            save_all(checkpointer, saved, step)
            # The restored arrays are alive: their memory was not written.
            assert same(state, saved.state(step - 1))
            del state
        assert len(unused(saved)) == 3
        gc.collect()
        save_all(checkpointer, saved, 9, 10)
        assert slots() == 2


def test_attempt_that_failed_lets_go_of_what_it_placed(saved: World) -> None:
    """Without a garbage collection: a slot that stays lent is room that the next saves lack."""
    manifests = saved.ramdisk.rglob("slot_*.manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime_ns)
    slot = newest.with_name(newest.name.split(".")[0] + ".bin")
    with slot.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    gc.disable()
    try:
        with saved.open() as checkpointer:
            checkpointer.prefetch(specs(saved))
            state = check(checkpointer, saved, 1)
            save_all(checkpointer, saved, 2, 3, 4, 5)
            assert same(state, saved.state(1))
            assert len(list(saved.ramdisk.rglob("slot_*.bin"))) == 3
    finally:
        gc.enable()


def test_stop_while_a_prefetch_is_under_way(saved: World) -> None:
    gate = Gate(saved, "restore.planned")
    checkpointer = saved.open(on_event=gate)
    checkpointer.prefetch(specs(saved))
    gate.wait()
    threading.Timer(0.2, gate.open).start()
    checkpointer.stop()
    assert {"prefetch.given_up", "prefetch.finished"} & set(saved.names()), "its thread has ended"
    with pytest.raises(CheckpointError, match="was stopped"):
        checkpointer.prefetch(specs(saved))
    with saved.open() as again:
        check(again, saved, 2)


def test_one_prefetch_at_a_time(saved: World) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        with pytest.raises(CheckpointError, match="call restore first"):
            checkpointer.prefetch(specs(saved))
        check(checkpointer, saved, 2)
    with saved.open() as unused_one:
        unused_one.prefetch(specs(saved))
    with saved.open() as checkpointer:
        check(checkpointer, saved, 2)


def test_preemption_notice_meanwhile_is_not_lost(saved: World) -> None:
    gate = Gate(saved, "restore.planned")
    with saved.open(on_event=gate) as checkpointer:
        checkpointer.prefetch(specs(saved))
        gate.wait()
        signal.raise_signal(signal.SIGTERM)
        gate.open()
        check(checkpointer, saved, 2)
        assert checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        assert checkpointer.reached_preemption(3)
        checkpointer.wait_until_finished()
        assert checkpointer.latest_step() == 3
