"""Copies of shards in the memory of their own devices, within a budget shared by all snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import jax
from absl import logging

CopyOnDevice = Callable[[list[jax.Array]], list[jax.Array]]


def _copy_all(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.numpy.copy(array) for array in arrays]


copy_on_device: CopyOnDevice = jax.jit(_copy_all)
"""Copies arrays of one device with one program on that device: no other process takes part, and it
runs between the steps dispatched before and after."""


class DeviceCopies:
    """Makes copies and counts their bytes on each device. Thread-safe.

    Sizes are those of the values; a device may pad them.
    """

    def __init__(self, limit_bytes: int, copy: CopyOnDevice = copy_on_device) -> None:
        """``limit_bytes``: maximum on each device."""
        self.limit_bytes = limit_bytes
        self._copy = copy
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}

    def make(
        self, sources: Mapping[int, Sequence[jax.Array]], needs: Mapping[int, int]
    ) -> dict[int, list[jax.Array]] | None:
        """Return copies of the single-device arrays ``sources``, by device id, in their order.

        Does not block; the sources may be donated then. None when the copies of another snapshot
        use too much of the budget, or a device has no memory left; the caller then waits for the
        transfer. ``needs`` (bytes by device id) counts as used until ``give_back``.
        """
        with self._lock:
            if any(self._used.get(d, 0) + n > self.limit_bytes for d, n in needs.items()):
                return None
            for device, nbytes in needs.items():
                self._used[device] = self._used.get(device, 0) + nbytes
        try:
            return {device: self._copy(list(arrays)) for device, arrays in sources.items()}
        except BaseException as error:
            for device, nbytes in needs.items():
                self.give_back(device, nbytes)
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                logging.warning("no device memory for the copies of a snapshot: %s", error)
                return None
            raise

    def give_back(self, device: int, nbytes: int) -> None:
        """Return ``nbytes`` of ``device`` to the budget, after the copy was released."""
        with self._lock:
            self._used[device] -= nbytes
