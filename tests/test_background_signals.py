"""Signals at every moment of a wait: the flag is set, and nothing waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import emergency_ckpt.background
from emergency_ckpt.background import SignalFlag, join, wait_for

SIGNALS = 1000
PROGRAM = """
import signal
from emergency_ckpt.background import SignalFlag

flag = SignalFlag()
signal.signal(signal.SIGTERM, lambda number, frame: flag.set())
while True:
    flag.clear()
    print("ready", flush=True)
    flag.wait()
"""


@pytest.fixture
def raising_at() -> Iterator[Callable[[Callable[[], object], int], bool]]:
    """Calls a function with a signal at its instruction of a number, if it has so many."""
    file = emergency_ckpt.background.__file__
    before = sys.gettrace()

    def call(function: Callable[[], object], number: int) -> bool:
        seen = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal seen
            del arg
            if frame.f_code.co_filename != file:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == number:
                    signal.raise_signal(signal.SIGUSR1)
            return trace

        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
        return seen >= number

    yield call
    sys.settrace(before)


@pytest.fixture
def flag() -> Iterator[SignalFlag]:
    """A flag that SIGUSR1 sets."""
    flag = SignalFlag()
    before = signal.signal(signal.SIGUSR1, lambda *_: flag.set())
    yield flag
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["wait", "set", "clear"])
def test_signal_at_any_instruction_blocks_nothing(
    flag: SignalFlag, raising_at: Callable[[Callable[[], object], int], bool], call: str
) -> None:
    number = 1
    while raising_at(lambda: flag.wait(0.001) if call == "wait" else getattr(flag, call)(), number):
        assert flag.is_set() or call == "clear"
        flag.clear()
        number += 1
    assert number > 3


@pytest.mark.timeout(120)
def test_signals_just_before_a_wait_end_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for _ in range(SIGNALS):
                assert process.stdout.readline() == "ready\n"
                process.send_signal(signal.SIGTERM)
        finally:
            process.kill()


def test_flag_is_set_from_another_thread() -> None:
    flag = SignalFlag()
    threading.Timer(0.05, flag.set).start()
    assert flag.wait(60)
    assert flag.wait(0)
    flag.clear()
    assert not flag.wait(0.01)
    assert not flag.wait(0)


@pytest.mark.timeout(60)
def test_handlers_run_during_long_waits() -> None:
    """Of signals that do not wake the wait, as those that come just before it.

    The waits are longer than the test may take: at their ends the handlers would run, too.
    """
    changed, handled = threading.Condition(), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    asleep = threading.Thread(target=handled.wait, args=(600,), daemon=True)
    asleep.start()
    try:
        # The other thread takes the signal, so that the main thread sleeps on.
        assert asleep.ident is not None
        threading.Timer(0.05, signal.pthread_kill, (asleep.ident, signal.SIGUSR1)).start()
        assert join(asleep, 600)
        handled.clear()
        threading.Timer(0.05, signal.pthread_kill, (start_sleep().ident, signal.SIGUSR1)).start()
        with changed:
            assert wait_for(changed, handled.is_set, 600)
    finally:
        signal.signal(signal.SIGUSR1, before)


def start_sleep() -> threading.Thread:
    thread = threading.Thread(target=time.sleep, args=(2,))
    thread.start()
    return thread
