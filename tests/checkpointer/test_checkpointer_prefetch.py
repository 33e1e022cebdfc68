"""A prefetch in a job of one process: what it brings, and all that may come between."""

from __future__ import annotations

import collections
import gc
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import flip
from jax.experimental.layout import Format, Layout
from state_samples import assert_same
from world import LONG_S, World, finish, logged, same, save_all

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


def live_steps(others: list[jax.Array]) -> list[int]:
    """The steps whose arrays are on the devices, besides ``others``, such as an earlier test's."""
    known = set(map(id, others))
    live = [a for a in jax.live_arrays() if a.shape == (8, 4) and id(a) not in known]
    return sorted(int(np.asarray(a)[0, 0]) for a in live)


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
        saved.wait_for("prefetch.finished")
        before = saved.names()
        assert "restore.fetched" in before
        assert "restore.started" not in before
        check(checkpointer, saved, 2)
        after = saved.names()[len(before) :]
        assert {"restore.started", "restore.finished"} <= set(after)
        assert not {"restore.loaded", "restore.fetched", "prefetch.unused"} & set(after)
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
        assert saved.names().count("restore.fetched") == 1
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
        saved.wait_for("prefetch.finished")
        assert position.at == 9
        with pytest.raises(CheckpointError, match="host_state"):
            checkpointer.restore(state=specs(saved), host_state={"other": position})
        assert position.at == 9
        # That one took the prefetch with it; this is an ordinary restore.
        assert checkpointer.restore(state=specs(saved), host_state={"it": position})[0] == 4
        assert position.at == 0


def test_another_step_is_an_ordinary_restore(saved: World) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        step, state = checkpointer.restore(1, state=specs(saved), host_state={})
        assert step == 1
        assert same(state, saved.state(1))
        (told,) = unused(saved)
        assert told == "step 2 was prefetched, and 1 is restored"


@pytest.mark.parametrize("asked", [{"step": 2}, {"host_state": None}, {"keep_newer": True}])
def test_same_arrays_for_another_request(saved: World, asked: dict[str, Any]) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        host = {"at": 0}
        arguments = {"state": specs(saved), "host_state": host, **asked}
        step, state = checkpointer.restore(**arguments)
        assert step == 2
        assert same(state, saved.state(2))
        assert host == {"at": 0 if "host_state" in asked else 2}
        assert saved.names().count("restore.fetched") == 1
        assert unused(saved) == []


def test_host_state_is_brought_though_not_prefetched(saved: World) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved), wants_host_state=False)
        check(checkpointer, saved, 2)
        assert saved.names().count("restore.fetched") == 1


@pytest.mark.parametrize("what", ["sharding", "structure", "host value"])
def test_another_state_is_an_ordinary_restore(saved: World, what: str) -> None:
    other: Any = specs(saved)
    if what == "sharding":
        other["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    elif what == "structure":
        other = collections.OrderedDict(other)
    else:
        other["host"] = np.int64(0)
    with saved.open() as checkpointer:
        checkpointer.prefetch(other)
        saved.wait_for("prefetch.finished")
        check(checkpointer, saved, 2)
        (told,) = unused(saved)
        assert "another state was prefetched" in told


def test_layout_is_that_of_the_restore(saved: World) -> None:
    wanted = specs(saved)
    turned = Format(Layout((1, 0)), wanted["w"].sharding)
    wanted["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=turned)
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        saved.wait_for("prefetch.finished")
        _, state = checkpointer.restore(state=wanted)
        assert unused(saved) == []
    expected = saved.state(2)
    expected["w"] = jax.device_put(expected["w"], turned)
    assert_same(state, expected)


def test_arrays_are_given_once(saved: World) -> None:
    with saved.open() as checkpointer:
        checkpointer.prefetch(specs(saved))
        state = check(checkpointer, saved, 2)
        for leaf in jax.tree.leaves(state):
            if isinstance(leaf, jax.Array):
                leaf.delete()  # as a donation does
        check(checkpointer, saved, 2)
        assert saved.names().count("restore.fetched") == 2


@pytest.mark.parametrize("by", ["save", "stop", "removal"])
def test_cached_arrays_are_released(saved: World, by: str) -> None:
    others = jax.live_arrays()
    with saved.open(local_keep_last_n=2) as checkpointer:
        checkpointer.prefetch(specs(saved))
        saved.wait_for("prefetch.finished")
        assert live_steps(others) == [2]
        if by == "save":
            checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        elif by == "stop":
            checkpointer.stop()
        else:
            checkpointer.steps.remove(2)
        assert 2 not in live_steps(others)


@pytest.mark.parametrize("from_storage", [False, True], ids=["RAM", "storage"])
def test_cached_arrays_go_before_others_are_placed(saved: World, from_storage: bool) -> None:
    placed: list[list[int]] = []

    def listener(event: Event) -> None:
        saved.events.append(event)
        if event.name in ("restore.loaded", "restore.fetched"):
            placed.append(live_steps(others))

    with saved.open_both(local_save_every=3) as checkpointer:
        save_all(checkpointer, saved, *([4] if from_storage else [3]))
    others = jax.live_arrays()
    newest = 4 if from_storage else 3
    with saved.open_both(on_event=listener) as checkpointer:
        checkpointer.prefetch(specs(saved), step=2)
        saved.wait_for("prefetch.finished")
        check(checkpointer, saved, newest)
        assert placed == [[2], [], [newest]] if from_storage else [[2], [newest]]


def test_copies_lost_meanwhile_are_brought_again(saved: World) -> None:
    """The arrays are there, but this process would not hold what it has to hold."""
    with saved.open_both() as checkpointer:
        checkpointer.prefetch(specs(saved))
        saved.wait_for("prefetch.finished")
        saved.lose_ram()
        check(checkpointer, saved, 2)
        assert "restore.loaded" in saved.names()
        assert len(unused(saved)) == 1
    with saved.open() as checkpointer:
        check(checkpointer, saved, 2)


def test_nothing_there_is_a_fresh_start(world: World) -> None:
    with world.open() as checkpointer:
        checkpointer.prefetch(specs(world))
        world.wait_for("prefetch.nothing")
        given = specs(world)
        step, state = checkpointer.restore(state=given)
        assert step is None
        assert state is given


def test_failed_prefetch_is_logged_and_has_no_effect(saved: World) -> None:
    wrong = {**specs(saved), "w": jnp.zeros((8, 5))}
    with saved.open() as checkpointer, logged() as lines:
        checkpointer.prefetch(wrong)
        saved.wait_for("prefetch.failed")
        check(checkpointer, saved, 2)
        assert "(8, 5)" in unused(saved)[0]
        checkpointer.prefetch(wrong)
        with pytest.raises(StateMismatch, match=r"\(8, 5\)"):
            checkpointer.restore(state=wrong)
        checkpointer.prefetch(specs(saved), step=17)
        with pytest.raises(StepNotFound):
            checkpointer.restore(step=17, state=specs(saved), host_state={})
        check(checkpointer, saved, 2)
        failures = [line for line in lines if line.startswith("prefetch failed")]
        assert len(failures) == saved.names().count("prefetch.failed") == 3
        checkpointer.prefetch(wrong)
        save_all(checkpointer, saved, 3)
        checkpointer.prefetch(specs(saved))  # no restore has to come between
        check(checkpointer, saved, 3)


@pytest.mark.parametrize("point", ["restore.planned", "restore.fetched", None])
def test_save_before_the_restore_comes_first(saved: World, point: str | None) -> None:
    """Also one that meets the prefetch in the middle of its work."""
    gate = Gate(saved, point or "")
    with saved.open(on_event=gate) as checkpointer:
        checkpointer.prefetch(specs(saved))
        if point is None:
            saved.wait_for("prefetch.finished")
        else:
            gate.wait()
        assert checkpointer.save(step=3, state=saved.state(3), host_state={"at": 3})
        assert "save.published" not in saved.names() or point is None
        gate.open()
        finish(checkpointer)
        assert "save.complete" in saved.names()
        check(checkpointer, saved, 3)
        (told,) = unused(saved)
        assert "step 3 was saved before the restore" in told
        save_all(checkpointer, saved, 4)
        checkpointer.prefetch(specs(saved))
        check(checkpointer, saved, 4)


@pytest.mark.parametrize("point", ["restore.planned", "restore.fetched"])
def test_saves_do_not_wait_for_a_prefetch_that_hangs(saved: World, point: str) -> None:
    """Nor does it change RAM when it goes on."""
    gate = Gate(saved, point)
    with saved.open(on_event=gate, save_timeout_s=4.0) as checkpointer:
        checkpointer.prefetch(specs(saved))
        gate.wait()
        for step in (3, 4):
            assert checkpointer.save(step=step, state=saved.state(step), host_state={"at": step})
            checkpointer.wait_until_finished(LONG_S / 2)
        gate.open()
        saved.wait_for("prefetch.given_up")
        save_all(checkpointer, saved, 5, 6)
        check(checkpointer, saved, 6)
        checkpointer.prefetch(specs(saved))
        check(checkpointer, saved, 6)
    assert len(list(saved.ramdisk.rglob("slot_*.bin"))) <= 3


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
            # Every other one is not used: another structure is asked for.
            asked = collections.OrderedDict(specs(saved)) if step % 2 else specs(saved)
            found, state = checkpointer.restore(state=asked, host_state={})
            assert found == step - 1
            save_all(checkpointer, saved, step)
            # The restored arrays are alive: their memory was not written.
            assert same(dict(state), saved.state(step - 1))
            del state
        assert len(unused(saved)) == 3
        gc.collect()
        save_all(checkpointer, saved, 9, 10)
        assert slots() == 2


def test_attempt_that_failed_lets_go_of_what_it_placed(saved: World) -> None:
    """Without a garbage collection: a slot that stays lent is room that the next saves lack."""
    manifests = saved.ramdisk.rglob("slot_*.manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime_ns)
    flip(newest.with_name(newest.name.split(".")[0] + ".bin"), 0)
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
