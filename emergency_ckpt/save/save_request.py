"""One call of ``save``, as the saver hands it to the tiers, and the last one, held for ``stop``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.capture import SlotCapture
from emergency_ckpt.state.tree import PyTree
from emergency_ckpt.types import OrbaxStep, SaveId


@dataclasses.dataclass
class SaveRequest:
    """One call of ``save``, for all tiers.

    Attributes:
      must_exist: the step is wanted whatever the policies say; a tier that has it keeps it.
      orbax: what Orbax's readers find in storage besides the arrays.
      limit_s: how long a save may wait for the one before it; None: as the tier's setting says.
      both: both tiers are to save it, so that they share what leaves the devices.
      shared: what the local save shares, until the persistent save takes it.
    """

    save: SaveId
    state: PyTree
    host_state: object
    metrics: Mapping[str, Any] | None
    begun_s: float
    must_exist: bool = False
    orbax: OrbaxStep = OrbaxStep()  # noqa: RUF009 - immutable
    limit_s: float | None = None
    both: bool = False
    shared: SlotCapture | None = None
    _captured: list[host_states.Payload] = dataclasses.field(
        default_factory=list[host_states.Payload]
    )

    @property
    def step(self) -> int:
        return self.save.step

    def take_shared(self) -> SlotCapture | None:
        """Return what the local save shares, to be released by the caller; None the next time."""
        shared, self.shared = self.shared, None
        return shared

    def release(self) -> None:
        """End the interest of a persistent save that did not begin."""
        shared = self.take_shared()
        if shared is not None:
            shared.release()

    def capture(self) -> host_states.Payload:
        """The host state of the first call, for every tier: the next one may give other bytes."""
        if not self._captured:
            self._captured.append(host_states.capture(self.host_state))
        return self._captured[0]


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
