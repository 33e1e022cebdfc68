"""Double of ``src/maxtext/utils/maxtext_utils.py``: what becomes of the restored state."""

from typing import Any

import orbax.checkpoint.experimental.emergency.checkpoint_manager as emergency_checkpoint_manager


def overlay(checkpoint_manager: Any, restored: Any) -> Any:
    """The state of the emergency manager as it is, else an item of it."""
    is_emergency = isinstance(checkpoint_manager, emergency_checkpoint_manager.CheckpointManager)
    return restored if is_emergency else restored["items"]
