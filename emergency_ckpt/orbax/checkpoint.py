"""Drop-in for ``orbax.checkpoint`` in a training loop: a changed import adds a RAM tier.

``CheckpointManager`` and ``CheckpointManagerOptions`` are ours; every other name is Orbax's own
object. It is a separate module because ``emergency_ckpt.orbax`` already has a manager and options
of these names, those of Orbax's emergency module, with other arguments.
"""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as _ocp
from orbax.checkpoint import PyTreeCheckpointer, args

from emergency_ckpt.orbax.plain_manager import CheckpointManager, CheckpointManagerOptions

__all__ = ["CheckpointManager", "CheckpointManagerOptions", "PyTreeCheckpointer", "args"]


def __getattr__(name: str) -> Any:
    return getattr(_ocp, name)
