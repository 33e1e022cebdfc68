"""Signals that a program handles for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterable


@contextlib.contextmanager
def handling(numbers: Iterable[int], handle: Callable[[int], object]) -> Generator[None]:
    """Call ``handle`` with each of these signals during this context. Main thread only."""
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
