"""Signals that a program handles for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterable


@contextlib.contextmanager
def handling(numbers: Iterable[int], handle: Callable[[int], object]) -> Generator[None]:
    """Call ``handle`` with each of these signals during this context. Main thread only.

    But for those that the caller of the program made it ignore: SIGHUP by ``nohup``, so that a
    logout does not end the program; SIGINT by the ``&`` of a script, whose Ctrl-C is for another.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
