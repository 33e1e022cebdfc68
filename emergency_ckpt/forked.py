"""A child made by fork lets go of what it shares with its parent: locks, sockets, the exit's work.

A lock of ``flock`` and a listening port last until the last copy of their descriptor is closed: a
data loader's worker that outlives a killed trainer would keep the next start from both.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_shared: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def drop_in_child(shared: T, drop: Callable[[T], object]) -> None:
    """Call ``drop(shared)`` in every child that this process forks while ``shared`` lives.

    ``drop`` must take no lock, for its holder is not there, and do nothing to what the parent still
    uses: closing a descriptor is fine, shutting a connection down is not.
    """
    _shared[shared] = drop


def _drop_all() -> None:
    for shared, drop in list(_shared.items()):
        with contextlib.suppress(Exception):  # the others must go in any case
            drop(shared)
    _shared.clear()


os.register_at_fork(after_in_child=_drop_all)
