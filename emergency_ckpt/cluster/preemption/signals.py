"""Signal handlers of this process: SIGTERM for all subscribers; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

_STDERR = 2
_FIRST_SIGNAL = (
    b"WARNING: saves in progress have some time to finish; a second signal ends the process\n"
)


class SigtermListener:
    """One handler for all checkpointers of the process.

    It is set only in the main thread, and only where no other handler is set.
    """

    def __init__(self) -> None:
        self._events: list[threading.Event] = []

    def subscribe(self) -> threading.Event:
        """Return an event that is set at each SIGTERM from now on."""
        event = threading.Event()
        self._events.append(event)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
        return event

    def unsubscribe(self, event: threading.Event) -> None:
        """Unsubscribe; the last one restores the earlier handler. Idempotent."""
        if event in self._events:
            self._events.remove(event)
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if not self._events and ours and _in_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        for event in self._events:
            event.set()


SIGTERM = SigtermListener()


@contextlib.contextmanager
def second_signal_ends() -> Generator[None]:
    """Let a second SIGTERM or SIGINT end the process at once, inside this context.

    For a process that is about to end. Only in the main thread. Handlers that Python does not know
    (JAX's) are not restored.
    """
    if not _in_main_thread():
        yield
        return
    seen: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        del frame
        seen.append(signum)
        if len(seen) > 1:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        # Not by logging: the signal may interrupt a write to the same stream, which then refuses
        # a second one, and the line would be lost.
        with contextlib.suppress(OSError):
            os.write(_STDERR, _FIRST_SIGNAL)

    before = {kind: signal.signal(kind, on_signal) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
