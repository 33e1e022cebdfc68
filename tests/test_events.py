"""Events reach the listener; a listener that fails disturbs nobody."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from emergency_ckpt.events import Event, EventSink


def test_listener_gets_each_event_in_order() -> None:
    seen: list[Event] = []
    sink = EventSink(seen.append, process_index=3)
    before_s = time.time()
    sink.emit("save.started", step=5, tier="local")
    sink.emit("save.failed")
    assert [event.name for event in seen] == ["save.started", "save.failed"]
    assert seen[0].fields == {"process": 3, "step": 5, "tier": "local"}
    assert before_s <= seen[0].time_s <= time.time()


def test_listener_that_raises_does_not_disturb() -> None:
    calls: list[str] = []

    def broken(event: Event) -> None:
        calls.append(event.name)
        raise RuntimeError("observer's fault")

    sink = EventSink(broken, process_index=0)
    sink.emit("one")
    sink.emit("two")
    assert calls == ["one", "two"]


def test_listener_that_exits_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Python ends the thread alone, and without a word."""
    calls: list[str] = []

    def exiting(event: Event) -> None:
        calls.append(event.name)
        sys.exit("of a listener")

    def close() -> None:
        calls.append("close")
        sys.exit("of an observer")

    def work() -> None:
        sink.emit("one")
        sink.emit("two")
        sink.close()
        calls.append("end")

    sink = EventSink(exiting, lambda event: calls.append(f"next {event.name}"), process_index=0)
    sink.on_close(lambda: calls.append("closed"))
    sink.on_close(close)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert calls == ["one", "next one", "two", "next two", "close", "closed", "end"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["listener failed on event one", "listener failed on event two"]


@pytest.fixture
def handled_signals() -> Iterator[tuple[int, int]]:
    """Signals with the handlers of a program that ends at SIGTERM, and of Python at SIGINT."""

    def end(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        sys.exit("of the handler")

    handlers = {signal.SIGUSR1: end, signal.SIGUSR2: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield signal.SIGUSR1, signal.SIGUSR2
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_that_interrupt_a_listener_end_the_program(
    handled_signals: tuple[int, int],
) -> None:
    """Python runs the handler inside whatever the main thread does."""
    exits, interrupts = handled_signals
    sink = EventSink(lambda _: signal.raise_signal(exits), process_index=0)
    with pytest.raises(SystemExit, match="of the handler"):
        sink.emit("one")
    sink = EventSink(lambda _: signal.raise_signal(interrupts), process_index=0)
    with pytest.raises(KeyboardInterrupt):
        sink.emit("one")
