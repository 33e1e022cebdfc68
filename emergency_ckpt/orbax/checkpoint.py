"""Drop-in for ``orbax.checkpoint`` in a training loop: a changed import adds a RAM tier.

``CheckpointManager`` and ``CheckpointManagerOptions`` are ours, also in the modules
``checkpoint_manager`` and ``checkpoint_managers``, and so is ``v1``; every other name is Orbax's
own object. It is a separate module because ``emergency_ckpt.orbax`` already has a manager and
options of these names, those of Orbax's emergency module, with other arguments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import orbax.checkpoint as _ocp
from orbax.checkpoint import PyTreeCheckpointer, args
from orbax.checkpoint import checkpoint_manager as _orbaxs_manager
from orbax.checkpoint import checkpoint_managers as _orbaxs_managers

from emergency_ckpt.orbax import v1
from emergency_ckpt.orbax.plain_manager import CheckpointManager, CheckpointManagerOptions

__all__ = [
    "CheckpointManager",
    "CheckpointManagerOptions",
    "PyTreeCheckpointer",
    "args",
    "checkpoint_manager",
    "checkpoint_managers",
    "v1",
]


def _with_ours(orbaxs: ModuleType) -> ModuleType:
    """Return a module with the names of ``orbaxs``, where the manager and its options are ours."""
    module = ModuleType(orbaxs.__name__, orbaxs.__doc__)
    ours = (CheckpointManager, CheckpointManagerOptions)
    vars(module).update(vars(orbaxs), **{kind.__name__: kind for kind in ours})
    return module


checkpoint_manager = _with_ours(_orbaxs_manager)
checkpoint_managers = _with_ours(_orbaxs_managers)


def __getattr__(name: str) -> Any:
    return getattr(_ocp, name)
