"""Signal handlers of this process: SIGTERM for all subscribers; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

from emergency_ckpt.background import SignalFlag

_STDERR = 2
_ENDING = (signal.SIGTERM, signal.SIGINT)
_FIRST_SIGNAL = (
    b"WARNING: saves in progress have some time to finish; a second signal ends the process\n"
)


class SigtermListener:
    """One handler for all checkpointers of the process.

    It is set only in the main thread, and only where no other handler is set.
    """

    def __init__(self) -> None:
        self._flags: list[SignalFlag] = []

    def subscribe(self) -> SignalFlag:
        """Return a flag that is set at each SIGTERM from now on."""
        flag = SignalFlag()
        self._flags.append(flag)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
        return flag

    def unsubscribe(self, flag: SignalFlag) -> None:
        """Unsubscribe; the last one restores the earlier handler. Idempotent."""
        if flag in self._flags:
            self._flags.remove(flag)
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if not self._flags and ours and _in_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        for flag in self._flags:
            flag.set()


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

    def on_signal(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        # The second one needs no handler, so that it also ends a wait that no handler interrupts.
        for kind in _ENDING:
            signal.signal(kind, signal.SIG_DFL)
        # Not by logging: the signal may interrupt a write to the same stream, which then refuses
        # a second one, and the line would be lost.
        with contextlib.suppress(OSError):
            os.write(_STDERR, _FIRST_SIGNAL)

    before = {kind: signal.signal(kind, on_signal) for kind in _ENDING}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
