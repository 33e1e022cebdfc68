"""The step that was last given to ``save``, held so that ``stop`` can save it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from emergency_ckpt.save.save_request import SaveRequest


class LastStep:
    """The newest step that ``save`` was called with. For the training thread.

    The host state is captured at the call: afterwards the iterator moves on, and what it says at
    the end may be another step's. Device arrays are held by reference: arrays that the caller
    neither donates nor drops cost nothing more, and dropped ones stay until the next call.
    """

    def __init__(self) -> None:
        self._request: SaveRequest | None = None

    def hold(self, request: SaveRequest) -> None:
        """Hold ``request`` instead of the step before. Raises HostStateError."""
        request.capture()
        # The containers and the arrays of numpy are the caller's, who may write to them.
        state = jax.tree.map(_unshared, request.state)
        self._request = dataclasses.replace(request, state=state, host_state=None)

    def take(self) -> SaveRequest | None:
        """Return what is held, and hold nothing any more; None when nothing was."""
        request, self._request = self._request, None
        return request


def was_donated(state: Any) -> bool:
    """Return whether device memory of ``state`` was given away, so that nothing can be saved."""
    leaves = jax.tree.leaves(state)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def _unshared(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
