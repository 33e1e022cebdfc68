"""Double of ``src/maxtext/common/emergency_checkpointing.py`` of MaxText 0.2.5.

This module and ``checkpointing.py`` are written from what is known of MaxText's contract at this
version: the calls of its emergency mode in the same order, and the lines that the page changes as
they stand there.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp
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
    return CheckpointManager(
        local_checkpoint_dir,
        persistent_checkpoint_dir,
        global_mesh=global_mesh,
        abstract_state=abstract_state,
        options=emergency_checkpoint_manager.CheckpointManagerOptions(
            local=emergency_checkpoint_manager.LocalCheckpointOptions(
                save_interval_steps=local_save_interval_steps
            ),
            persistent=emergency_checkpoint_manager.PersistentCheckpointOptions(
                save_interval_steps=persistent_save_interval_steps
            ),
        ),
        logger=None,
    )


def save(checkpoint_manager: Any, step: int, state: Any, config: Any, force: bool) -> bool:
    """Save the state alone."""
    checkpoint_args = ocp.args.PyTreeSave(
        item=state,
        save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state),
        ocdbt_target_data_file_size=1 << 20,
    )
    return checkpoint_manager.save(
        step, args=ocp.args.Composite(state=checkpoint_args), force=force
    )


def restore(checkpoint_manager: Any, step: int, abstract_unboxed_pre_state: Any) -> Any:
    """Restore the state alone."""
    restore_args = jax.tree.map(
        lambda data: ocp.type_handlers.ArrayRestoreArgs(sharding=data.sharding),
        abstract_unboxed_pre_state,
    )
    checkpoint_args = ocp.args.PyTreeRestore(
        item=abstract_unboxed_pre_state, restore_args=restore_args, partial_restore=True
    )
    return checkpoint_manager.restore(step, args=ocp.args.Composite(state=checkpoint_args)).state
