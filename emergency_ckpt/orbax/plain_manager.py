"""``CheckpointManager`` with the contract of plain Orbax's (0.12.8), and a RAM tier in addition."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.orbax import plain_items
from emergency_ckpt.orbax.manager import CheckpointManager as BothTiersManager
from emergency_ckpt.orbax.plain_options import both_tiers, local_directory_of

_MOMENT_S = 0.001


class CheckpointManager(BothTiersManager):
    """Saves to ``directory`` as plain Orbax does, and also to the hosts' RAM.

    All processes must call the constructor, ``restore``, ``reload``, ``delete``, ``all_steps`` and
    ``close``, in the same order; and ``save`` at the same steps.

    A step of one item has plain Orbax's format, as item ``default``, and can be read by it; steps
    that plain Orbax wrote are restored. Differences from Orbax's manager (0.12.8):

    - ``restore`` needs the state to restore into, with its shardings: in ``args``, or as ``items``.
    - JSON items and iterators are kept for each process, copied to other slices, and stored in
      ``<directory>/host_state``; plain Orbax does not read these. Several items with arrays are
      stored together, as a dict.
    - ``save(force=True)`` of a step that exists returns False.
    - ``save`` and ``should_save`` return True also for a step that is saved to RAM alone.
    - Handlers' settings (OCDBT, file sizes) are not used. Unsupported options are a ValueError,
      those without effect a warning. Our ``CheckpointManagerOptions`` has further ones.

    Raises:
      ValueError: an option or an item's checkpointer is not supported.
      ConfigError, LocalTierError, RestoreFailed, DeadlineExceeded: as ``EmergencyCheckpointer``.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        del item_names, handler_registry
        options = ocp.CheckpointManagerOptions() if options is None else options
        made = both_tiers(options)
        local = Path(os.path.abspath(local_directory_of(options)))
        local.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._checkpointers = checkpointers if checkpointers is not None else item_handlers
        text = os.fspath(directory)
        super().__init__(
            local,
            text if "://" in text else os.path.abspath(text),
            None,
            (),  # no state is known yet: a step is complete by its own leaves
            options=made,
            metadata=dict(metadata or {}),
            logger=logger,
        )

    def save(  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax's own two differ
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save in the tiers where a save is due; return True if one was started. Not collective.

        Args:
          items: older form: the state, or a dict of states by the name of their checkpointer.
          args: ``PyTreeSave``, ``StandardSave``, or ``Composite`` of these, ``JsonSave`` and
            iterators' arguments.
          metrics, force, custom_metadata: as in ``emergency_ckpt.orbax.CheckpointManager.save``.

        Raises:
          ValueError: an item is not supported. Otherwise as that method.
        """
        del save_kwargs
        given = plain_items.saved(items, args, self._checkpointers)
        return self._save_state(
            step,
            given.state,
            lambda: plain_items.host_state_of(given, custom_metadata, metrics),
            metrics,
            force=bool(force),
        )

    def restore(  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax's own two differ
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: Any = None,
    ) -> Any:
        """Restore ``step``, or the newest complete one. Collective; blocks.

        Returns the state, of the structure, dtypes and shardings of the given one; with several
        items a ``Composite``. Iterators are repositioned in place.

        Raises:
          ValueError: no state is given, or ``directory`` is not this manager's.
          Otherwise as ``emergency_ckpt.orbax.CheckpointManager.restore``.
        """
        if directory is not None and epath.Path(directory) != self.directory:
            raise ValueError(f"restore from {self.directory} only: build a manager of {directory}")
        wanted = plain_items.wanted(items, args, restore_kwargs, self._checkpointers)
        host_state = plain_items.target_for(wanted)
        found, state = self._restore_into(step, wanted.state, host_state)
        if host_state is not None:
            plain_items.check_restored(wanted, host_state, found)
        return wanted.result(state, host_state)

    def item_metadata(self, step: int) -> Any:
        """Return shapes and dtypes of ``step`` by path, as Orbax's ``ArrayMetadata``."""
        return super().item_metadata(step).state

    def is_saving_in_progress(self) -> bool:
        """Return whether this process has a save in progress. Not collective."""
        try:
            self._checkpointer.wait_until_finished(_MOMENT_S)
        except DeadlineExceeded:
            return True
        return False
