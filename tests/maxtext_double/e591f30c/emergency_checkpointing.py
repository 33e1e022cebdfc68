"""Double of ``src/maxtext/common/emergency_checkpointing.py``: who makes the manager.

These three modules are written from what is known of MaxText's contract of August 2026: the calls
of its emergency mode in the same order, and the lines that the README changes as they stand there.
"""

from typing import Any

import jax
import orbax.checkpoint.experimental.emergency.checkpoint_manager as emergency_checkpoint_manager

CheckpointManager = emergency_checkpoint_manager.CheckpointManager


def create_emergency_checkpoint_manager(
    local_checkpoint_dir: str,
    persistent_checkpoint_dir: str,
    global_mesh: jax.sharding.Mesh,
    abstract_state: Any,
    local_save_interval_steps: int,
    persistent_save_interval_steps: int,
) -> Any:
    """The manager, as MaxText's trainer has it made."""
    options = emergency_checkpoint_manager.CheckpointManagerOptions(
        local=emergency_checkpoint_manager.LocalCheckpointOptions(
            save_interval_steps=local_save_interval_steps
        ),
        persistent=emergency_checkpoint_manager.PersistentCheckpointOptions(
            save_interval_steps=persistent_save_interval_steps
        ),
    )
    return CheckpointManager(
        local_checkpoint_dir,
        persistent_checkpoint_dir,
        global_mesh=global_mesh,
        abstract_state=abstract_state,
        options=options,
        logger=None,
    )
