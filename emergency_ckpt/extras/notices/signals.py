"""A signal as a notice, such as SIGUSR1, which Slurm sends a while before a job's time is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from emergency_ckpt.errors import ConfigError

_NAMES = ("USR1", "USR2", "HUP", "ALRM", "URG", "WINCH")
"""SIGTERM is a notice anyway; of the others these are the ones that schedulers send."""


def signal_named(name: str) -> signal.Signals | None:
    """Return the signal of a name such as USR1 or SIGUSR1; None for one that is no notice."""
    short = name.removeprefix("SIG")
    return signal.Signals[f"SIG{short}"] if short in _NAMES else None


class SignalSource:
    """Counts a signal from ``begin`` to ``end``. An earlier handler of Python's is called too."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._count = 0
        self._earlier: Any = None
        self._users = 0
        self._begun: list[int] = []

    def begin(self) -> None:
        """Set the handler, before which the signal ends the process. ConfigError: not possible."""
        if threading.current_thread() is not threading.main_thread():
            name = self._number.name
            problem = f"notices(signal:{name}): only the main thread can set a handler of {name}"
            raise ConfigError([f"{problem}: make the checkpointer there"])
        self._users += 1
        self._begun.append(self._count)
        if self._users == 1:
            self._earlier = signal.getsignal(self._number)
            signal.signal(self._number, self._on_signal)

    def end(self) -> None:
        """After the last ``begin``, set the earlier handler again, unless another was set since."""
        self._users -= 1
        del self._begun[self._users :]  # of one that ended before it watched
        in_main = threading.current_thread() is threading.main_thread()
        is_ours = signal.getsignal(self._number) == self._on_signal
        if self._users == 0 and in_main and is_ours:
            # None: a handler of C, which Python cannot set again.
            signal.signal(self._number, signal.SIG_DFL if self._earlier is None else self._earlier)

    def watch(self) -> Callable[[], str]:
        """Return a function that says in words that the signal has come since its last call.

        The first call of the function looks back to the ``begin`` that the function belongs to.
        """
        seen_count = self._begun.pop(0) if self._begun else self._count

        def inspect() -> str:
            nonlocal seen_count
            before, seen_count = seen_count, self._count
            return f"{self._number.name} has come" if seen_count > before else ""

        return inspect

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if callable(self._earlier):
            self._earlier(number, frame)
