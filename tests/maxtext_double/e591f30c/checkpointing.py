"""Double of ``src/maxtext/common/checkpointing.py``: it passes the manager's class on."""

from typing import Any

import emergency_checkpointing
import jax
import orbax.checkpoint as ocp
from etils import epath

Composite = ocp.args.Composite
EmergencyCheckpointManager = emergency_checkpointing.CheckpointManager
Path = epath.Path


def load_state_if_possible(
    checkpoint_manager: Any, data_iterator: Any, abstract_state: Any
) -> tuple[Any, None]:
    """The newest step's state, and no parameters."""
    step = checkpoint_manager.latest_step()
    if step is None:
        return None, None
    restore_args = jax.tree.map(
        lambda data: ocp.type_handlers.ArrayRestoreArgs(sharding=data.sharding), abstract_state
    )
    checkpoint_args = ocp.args.PyTreeRestore(
        item=abstract_state, restore_args=restore_args, partial_restore=True
    )
    if not isinstance(checkpoint_manager, EmergencyCheckpointManager):
        raise TypeError(type(checkpoint_manager))
    restored = checkpoint_manager.restore(step, args=Composite(state=checkpoint_args)).state
    return restored, None


def save_checkpoint(
    checkpoint_manager: Any, step: int, state: Any, data_iterator: Any, force: bool = False
) -> bool:
    """Save ``state`` where a save is due."""
    checkpoint_args = ocp.args.PyTreeSave(
        item=state,
        save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state),
        ocdbt_target_data_file_size=1 << 20,
    )
    return checkpoint_manager.save(step, args=Composite(state=checkpoint_args), force=force)


def last_save(checkpoint_manager: Any, step: int, state: Any, data_iterator: Any) -> None:
    """Do as MaxText after the last step, and after each for a preemption."""
    if checkpoint_manager.latest_step() != step and step not in checkpoint_manager.all_steps():
        save_checkpoint(checkpoint_manager, step, state, data_iterator, force=True)
    checkpoint_manager.wait_until_finished()
    assert not checkpoint_manager.reached_preemption(step)
