"""SIGTERM beside handlers of others: each is called, or the user learns that one is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from emergency_ckpt.cluster.preemption import OwnNotices, PreemptionWatch, second_signal_ends
from emergency_ckpt.events import Event, EventSink


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Watch:
    """The watch of a job of one process, and the texts that it says."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._step = 0
        sink = EventSink(self._listen, process_index=0)
        self.watch = PreemptionWatch(OwnNotices(sink), grace_s=60.0)

    def _listen(self, event: Event) -> None:
        assert event.name == "preemption.unheard"
        self.texts.append(str(event.fields["text"]))

    def step(self) -> bool:
        self._step += 1
        return self.watch.reached(self._step)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


class Handler:
    """A handler of the user's, which may call the one that it found."""

    def __init__(self) -> None:
        self.calls = 0
        self.found: object = None

    def set(self) -> None:
        self.found = signal.signal(signal.SIGTERM, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.calls += 1
        if callable(self.found):
            self.found(signum, frame)


def test_earlier_handler_is_called_too_and_set_again() -> None:
    handler = Handler()
    handler.set()
    watch = Watch()
    terminate()
    assert (handler.calls, watch.step()) == (1, True)
    watch.watch.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert watch.texts == []


def test_signal_that_was_ignored_is_a_notice() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = Watch()
    terminate()
    assert watch.step()
    watch.watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_later_handler_that_calls_on_is_heard() -> None:
    """Two checkpointers and a handler that calls its predecessor make a circle."""
    first, handler = Watch(), Handler()
    handler.set()
    second = Watch()
    terminate()
    assert handler.calls == 1
    assert (first.step(), second.step()) == (True, True)
    for each in (first, second):
        each.watch.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_later_handler_that_does_not_call_on_is_said_once() -> None:
    watch, handler = Watch(), Handler()
    handler.set()
    handler.found = None
    terminate()
    assert [watch.step() for _ in range(3)] == [False] * 3
    (text,) = watch.texts
    assert "a handler of SIGTERM was set" in text
    watch.watch.close()
    assert signal.getsignal(signal.SIGTERM) is handler, "it stays"


def test_checkpointer_of_another_thread_says_so() -> None:
    made: list[Watch] = []
    thread = threading.Thread(target=lambda: made.append(Watch()))
    thread.start()
    thread.join()
    assert not made[0].step()
    (text,) = made[0].texts
    assert "outside of the main thread" in text
    made[0].watch.close()


def test_handler_of_jax_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is C, and Python does not know it; its notices are a key in JAX's service."""
    monkeypatch.setattr("emergency_ckpt.cluster.preemption.jax_hears_notices", lambda: True)
    watch = Watch()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not watch.step()
    assert watch.texts == []
    Handler().set()  # in the place of JAX's
    assert not watch.step()
    assert "a handler of SIGTERM was set" in watch.texts[0]
    watch.watch.close()


def test_handler_taken_away_at_the_end_is_no_problem() -> None:
    watch = Watch()
    with second_signal_ends():
        assert not watch.step()
    terminate()
    assert watch.step()
    assert watch.texts == []
    watch.watch.close()


def test_fork_ends_by_the_signal_as_usual() -> None:
    watch = Watch()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert not watch.step()
    watch.watch.close()


def test_time_left_counts_from_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take long after it."""
    watch = Watch()
    terminate()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 40.0)
    assert watch.step()
    assert 19.0 < watch.watch.grace_left_s() <= 20.0
    watch.watch.close()


def test_checkpointer_ending_with_its_process_leaves_no_handler() -> None:
    """The handler of a second signal is restored after the last checkpointer's own."""
    notices = OwnNotices()
    with second_signal_ends():
        notices.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
