"""Drop-in for ``orbax.checkpoint`` in a training loop: change the import, and it has a RAM tier.

``CheckpointManager`` and ``CheckpointManagerOptions`` are ours; every other name is Orbax's own
object. This is a module of its own because ``emergency_ckpt.orbax`` has managers and options of
these names already, those of Orbax's emergency module, with other arguments: which one a call
means must not depend on the types of what it is given.
"""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as _ocp
from orbax.checkpoint import PyTreeCheckpointer, args

from emergency_ckpt.orbax.plain_manager import CheckpointManager
from emergency_ckpt.orbax.plain_options import CheckpointManagerOptions

__all__ = ["CheckpointManager", "CheckpointManagerOptions", "PyTreeCheckpointer", "args"]


def __getattr__(name: str) -> Any:
    return getattr(_ocp, name)
