"""Double of ``src/maxtext/common/checkpointing.py`` of MaxText 0.2.5."""

from typing import Any

import emergency_checkpointing
from etils import epath

EmergencyCheckpointManager = emergency_checkpointing.CheckpointManager
Path = epath.Path


def load_state_if_possible(
    checkpoint_manager: Any, data_iterator: Any, restore_target: Any
) -> tuple[Any, None]:
    """The newest step's state, and no parameters."""
    step = checkpoint_manager.latest_step()
    if step is None:
        return None, None
    if isinstance(checkpoint_manager, EmergencyCheckpointManager):
        restored = emergency_checkpointing.restore(checkpoint_manager, step, restore_target)
        return restored, None
    raise TypeError(type(checkpoint_manager))


def save_checkpoint(
    checkpoint_manager: Any, step: int, state: Any, data_iterator: Any, force: bool = False
) -> bool:
    """Save ``state`` where a save is due."""
    config = None
    if isinstance(checkpoint_manager, EmergencyCheckpointManager):
        return emergency_checkpointing.save(checkpoint_manager, step, state, config, force)
    raise TypeError(type(checkpoint_manager))


def last_save(checkpoint_manager: Any, step: int, state: Any, data_iterator: Any) -> None:
    """Do as MaxText after the last step, and after each for a preemption."""
    if checkpoint_manager.latest_step() != step and step not in checkpoint_manager.all_steps():
        save_checkpoint(checkpoint_manager, step, state, data_iterator, force=True)
    checkpoint_manager.wait_until_finished()
    assert not checkpoint_manager.reached_preemption(step)
