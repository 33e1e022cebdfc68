"""``<dir>/step_00000025/index``: how axlearn's tools find the steps of a directory, and what is in
them. Nothing in this package reads it: what counts is said by the persistent tier's own marker.

A JSON list of pairs: ``["step", 25]``, then ``[path, {"dtype": "float32", "shape": "(8, 16)"}]``
for each array and ``[path, type]`` for each iterator.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath

from emergency_ckpt.axlearn.mixed_state import is_iterator
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state.tree import PyTree, path_of
from emergency_ckpt.storage.calls import call_with_retries
from emergency_ckpt.storage.tier import DEFAULT_TIMEOUT_S

Entries = Sequence[tuple[str, Any]]

_NAME = "index"


def step_dir(directory: str, step: int) -> str:
    """Return the directory in which axlearn's tools look for ``step``."""
    return os.path.join(directory, f"step_{step:08d}")


def entries_of(step: int, state: PyTree) -> Entries:
    """Return the entries of the index for ``state``."""
    entries: list[tuple[str, Any]] = [("step", step)]
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        path = path_of(key_path)
        if is_iterator(leaf):
            entries.append((path, str(type(leaf))))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            dtype = getattr(leaf.dtype, "dtype", leaf.dtype)
            entries.append((path, {"dtype": str(dtype), "shape": str(tuple(leaf.shape))}))
        else:
            entries.append((path, leaf))
    return entries


class StepIndex:
    """The index files of one directory. Blocks for storage, at most ``timeout_s`` a call."""

    def __init__(self, directory: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    def write(self, step: int, entries: Entries) -> None:
        """Write the index of ``step``, all of it or nothing. PersistentTierError."""
        data = json.dumps(list(entries))
        path = epath.Path(step_dir(self._directory, step)) / _NAME

        def put() -> None:
            if "://" in self._directory:  # an object appears when its upload ends
                path.write_text(data)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{_NAME}.tmp")
            temporary.write_text(data)
            temporary.replace(path)

        self._call("write", step, put)

    def remove(self, step: int) -> None:
        """Remove the index of ``step``, if it has one. PersistentTierError."""
        path = epath.Path(step_dir(self._directory, step))

        def clear() -> None:
            (path / _NAME).unlink(missing_ok=True)
            if path.exists():
                path.rmtree()

        self._call("remove", step, clear)

    def _call(self, operation: str, step: int, work: Callable[[], None]) -> None:
        target = step_dir(self._directory, step)
        try:
            call_with_retries(target, work, deadline_s=time.monotonic() + self._timeout_s)
        except PersistentTierError:
            raise
        except Exception as error:  # clients raise whatever lies below them
            raise PersistentTierError(operation, f"{target}/{_NAME}", str(error)) from error
