"""Waits of the training thread for arrays that are still being computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

Look = Callable[[], None]
"""Called at intervals during a wait; an error that it raises ends the wait."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
_FIRST_LOOK_S = 1.0
_BETWEEN_LOOKS_S = 0.25


def wait_until_ready(arrays: Iterable[Any], look: Look) -> float:
    """Wait until all ``arrays`` have been computed, or have failed: who reads them is told.

    Returns the seconds that it took.

    JAX's own wait cannot be ended: where a process has died, the arrays of the others are never
    ready. ``look`` is called after a second, and from then on; its error ends the wait.
    """
    began_s = now_s = time.monotonic()
    next_look_s = began_s + _FIRST_LOOK_S
    for array in arrays:
        while not is_over(array):
            time.sleep(min(max(_SHORTEST_PAUSE_S, (now_s - began_s) / 100), _LONGEST_PAUSE_S))
            now_s = time.monotonic()
            if now_s >= next_look_s:
                next_look_s = now_s + _BETWEEN_LOOKS_S
                look()
    return time.monotonic() - began_s


def is_over(array: Any) -> bool:
    """Return whether the computation of ``array`` has ended: who reads it does not wait."""
    # Of a deleted array ``is_ready`` may end the process; who reads it gets an error.
    return array.is_deleted() or array.is_ready()


def no_look() -> None:
    """Look at nothing: the wait has no other end than its arrays."""
