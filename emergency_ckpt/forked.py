"""Release, in a forked child, of resources shared with its parent: locks, sockets, exit work.

A ``flock`` lock and a listening port last until the last copy of their descriptor is closed, so a
data loader's worker that outlives a killed trainer would keep the next start from both. The memory
of mapped files is not in a child at all: see ``native/engine/mapping.cc``.
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

    ``drop`` must take no lock, since its holder is not in the child, and must not affect the
    parent: it may close a descriptor but not shut down a connection.
    """
    _shared[shared] = drop


def _drop_all() -> None:
    for shared, drop in list(_shared.items()):
        with contextlib.suppress(Exception):  # the others must be dropped in any case
            drop(shared)
    _shared.clear()


os.register_at_fork(after_in_child=_drop_all)
