"""Drop-in for ``orbax.checkpoint.experimental.emergency.checkpoint_manager``: change the import.

What is the same: names, fields, defaults, what is saved when, what is kept, how steps are listed.
What is better is listed at ``CheckpointManager``.
"""

from emergency_ckpt.orbax.manager import CheckpointManager
from emergency_ckpt.orbax.options import (
    CheckpointManagerOptions,
    LocalCheckpointOptions,
    MultiprocessingOptions,
    PersistentCheckpointOptions,
)

__all__ = [
    "CheckpointManager",
    "CheckpointManagerOptions",
    "LocalCheckpointOptions",
    "MultiprocessingOptions",
    "PersistentCheckpointOptions",
]
