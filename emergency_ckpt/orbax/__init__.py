"""Drop-in for ``orbax.checkpoint.experimental.emergency.checkpoint_manager``: change the import.

Names, fields, defaults, the steps that are saved and kept, and the listing of steps are the same.
``CheckpointManager`` lists the differences.
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
