"""A user's own thread gives notice of a preemption: one save in both tiers, and then none."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import SlowStorage
from world import LONG_S, World, finish

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError, InvalidState


def request(ckpt: EmergencyCheckpointer) -> list[BaseException]:
    """Call ``request_preemption`` in a thread; return what it raised."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            ckpt.request_preemption()
        except CheckpointError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised


def save(ckpt: EmergencyCheckpointer, world: World, step: int) -> bool:
    return ckpt.save(step=step, state=world.state(step), host_state={"at": step})


def test_request_of_a_thread_saves_the_next_step_in_both_tiers(world: World) -> None:
    with world.open_both(local_save_every=100, save_every=100) as ckpt:
        assert not ckpt.reached_preemption(1)
        assert not save(ckpt, world, 1)
        assert request(ckpt) == []
        assert request(ckpt) == [], "one more is the same notice"
        assert ckpt.reached_preemption(2)
        assert save(ckpt, world, 2)
        finish(ckpt)
        known = ckpt.known_steps
        assert (list(known.local), list(known.persistent)) == ([2], [2])
    assert world.names().count("preemption.reached") == 1
    world.restores(2)


def test_loop_that_asks_for_no_notice_saves_at_a_request(world: World) -> None:
    with world.open_both(local_save_every=100, save_every=100) as ckpt:
        assert not save(ckpt, world, 1)
        assert request(ckpt) == []
        assert save(ckpt, world, 2)
        finish(ckpt)
    world.restores(2)


def test_handler_that_saves_inside_save_is_told_what_to_call(world: World) -> None:
    told: list[InvalidState] = []

    class Interrupted:
        def get_state(self) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return 2

        def set_state(self, state: int) -> None:
            """Nothing to set."""

    def on_signal(number: int, frame: object) -> None:
        for call in (
            lambda: ckpt.save(step=2, state=world.state(2), force=True),
            lambda: ckpt.restore(state=world.state(0)),
        ):
            with pytest.raises(InvalidState, match="request_preemption") as found:
                call()
            told.append(found.value)
        ckpt.request_preemption()

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with world.open_both(save_every=100) as ckpt:
            assert ckpt.save(step=2, state=world.state(2), host_state=Interrupted())
            finish(ckpt)
            assert ckpt.reached_preemption(3)
            assert save(ckpt, world, 3)
            finish(ckpt)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == 2
    world.restores(3)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_request_that_nobody_heeds_is_an_error(world: World, *, is_stopped: bool) -> None:
    with world.open_both(on_preemption="save" if is_stopped else "ignore") as ckpt:
        if is_stopped:
            ckpt.stop()
        (error,) = request(ckpt)
        assert isinstance(error, CheckpointError)


def test_waits_of_a_job_that_goes_on_outlast_the_grace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends the job after the notice, and a later save to storage takes its time."""
    with (
        ThreadPoolExecutor(1) as pool,
        world.open_both(save_every=100, preemption_grace_s=0.01) as ckpt,
    ):
        assert request(ckpt) == []
        assert save(ckpt, world, 1)
        world.wait_for("persistent.complete", step=1)
        slow = SlowStorage(monkeypatch)
        assert ckpt.save(step=2, state=world.state(2), force=True)
        assert slow.reached.wait(LONG_S)
        waiting = pool.submit(ckpt.wait_until_finished)
        try:
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
        finally:
            slow.go_on.set()
        waiting.result(LONG_S)
    assert world.named("preemption.missed") == []
    world.lose_ram()
    world.restores(2)
