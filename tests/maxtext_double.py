"""The calls that MaxText's checkpointing makes in emergency mode, in the same order.

Written from what is known of its contract, for the lines that the README changes: these stand here
as they stand there.
"""

from typing import Any

import grain.python as grain  # noqa: F401 - what the README adds uses it
import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.emergency.checkpoint_manager as emergency_checkpoint_manager

Composite = ocp.args.Composite
EmergencyCheckpointManager = emergency_checkpoint_manager.CheckpointManager


def create(config: Any, global_mesh: jax.sharding.Mesh, abstract_state: Any) -> Any:
    return EmergencyCheckpointManager(
        config.local_checkpoint_directory,
        config.checkpoint_dir,
        global_mesh=global_mesh,
        abstract_state=abstract_state,
        options=emergency_checkpoint_manager.CheckpointManagerOptions(
            local=emergency_checkpoint_manager.LocalCheckpointOptions(
                save_interval_steps=config.local_checkpoint_period
            ),
            persistent=emergency_checkpoint_manager.PersistentCheckpointOptions(
                save_interval_steps=config.checkpoint_period
            ),
        ),
        logger=None,
    )


def load(checkpoint_manager: Any, data_iterator: Any, abstract_state: Any) -> Any:
    step = checkpoint_manager.latest_step()
    if step is None:
        return None
    restore_args = jax.tree.map(
        lambda data: ocp.type_handlers.ArrayRestoreArgs(sharding=data.sharding), abstract_state
    )
    checkpoint_args = ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args)
    if not isinstance(checkpoint_manager, EmergencyCheckpointManager):
        raise TypeError(type(checkpoint_manager))
    return (checkpoint_manager.restore(step, args=Composite(state=checkpoint_args)).state, None)


def save(
    checkpoint_manager: Any, step: int, state: Any, data_iterator: Any, force: bool = False
) -> bool:
    checkpoint_args = ocp.args.PyTreeSave(
        item=state,
        save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state),
        ocdbt_target_data_file_size=1 << 20,
    )
    return checkpoint_manager.save(step, args=Composite(state=checkpoint_args), force=force)


def last_save(checkpoint_manager: Any, step: int, state: Any, data_iterator: Any) -> None:
    """What MaxText does after the last step, and after each for a preemption."""
    save(checkpoint_manager, step, state, data_iterator, force=True)
    checkpoint_manager.wait_until_finished()
    assert not checkpoint_manager.reached_preemption(step)
