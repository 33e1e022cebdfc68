"""``CheckpointManager`` with the contract of Orbax's emergency manager (0.12.8)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from emergency_ckpt.checkpointer import EmergencyCheckpointer
from emergency_ckpt.cluster.coordination import jax_hears_notices
from emergency_ckpt.cluster.preemption import is_good_end, is_success
from emergency_ckpt.cluster.process_placement import replicated_axis
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.config.validation import listeners_of
from emergency_ckpt.core.save.save_rules import plain_metrics, step_number
from emergency_ckpt.errors import CheckpointError, StepNotFound
from emergency_ckpt.events import Event
from emergency_ckpt.orbax import items
from emergency_ckpt.orbax.options import (
    CheckpointManagerOptions,
    check_kinds,
    settings_of,
    with_further,
)
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.restore.steps import StepDescription
from emergency_ckpt.state.tree import BoxTable, describe
from emergency_ckpt.types import OrbaxStep

if TYPE_CHECKING:
    from emergency_ckpt.extras.metrics import CheckpointLog

_open: weakref.WeakValueDictionary[str, CheckpointManager] = weakref.WeakValueDictionary()
"""The open manager of each run, by run id; a new one replaces it."""


class CheckpointManager(ocp.AbstractCheckpointManager):
    """Saves to the RAM of the hosts and to a persistent directory; restores from either.

    All processes must call the constructor, ``restore``, ``reload``, ``delete``, ``best_step``,
    ``all_steps(read=True)`` and ``close``, in the same order. ``save``, ``should_save`` and
    ``all_steps()`` are not collective and wait for no peer.

    A second manager of the same directories closes the first, unless the options of both tiers of
    one of them have ``read_only``. With one slice nothing is saved to RAM, unless
    ``with_one_slice``. docs/migrating_emergency.md lists the differences from Orbax's manager.

    Raises:
      FileNotFoundError: the local directory does not exist.
      ValueError: ``replica_axis_index`` is no axis of the mesh; a custom step name format;
        handlers.
      ConfigError, LocalTierError, RestoreFailed, DeadlineExceeded: as ``EmergencyCheckpointer``.
    """

    def __init__(
        self,
        local_directory: epath.PathLike,
        persistent_directory: epath.PathLike,
        global_mesh: jax.sharding.Mesh | None,
        abstract_state: Any,
        *,
        options: CheckpointManagerOptions | None = None,
        metadata: dict[str, Any] | None = None,
        logger: Any = None,
        item_handlers: Any = None,
        handler_registry: Any = None,
        persistent_non_replicated_directory: epath.PathLike | None = None,
    ) -> None:
        refused = {"item_handlers": item_handlers, "handler_registry": handler_registry}
        for name, given in refused.items():
            if given is not None:
                raise ValueError(
                    f"{name} is not supported: leave it out; dataset is kept with the state, by its"
                    " get_state and set_state"
                )
        if persistent_non_replicated_directory is not None:
            logging.warning(
                "nothing is written to %s: dataset is kept with the state, in both tiers."
                " Orbax's CheckpointManager of this directory restores what Orbax saved there",
                persistent_non_replicated_directory,
            )
        self._options = options = CheckpointManagerOptions() if options is None else options
        check_kinds(options, global_mesh)
        self._directory = epath.Path(persistent_directory)
        self._global_mesh = global_mesh
        self._abstract_state = abstract_state
        self._metadata = dict(metadata or {})
        self._axis: int | None = options.replica_axis_index
        has_orbaxs_slices = global_mesh is None or _slice_count(global_mesh, self._axis) > 1
        if global_mesh is not None and not has_orbaxs_slices:
            # A mesh may begin with axes of size 1 that a run does not use, as MaxText's with
            # ``diloco``. Then slices are along the axis that replicates the state over hosts.
            held_leaves = BoxTable(
                describe(abstract_state, "open"), jax.process_count()
            ).held_leaves()
            self._axis = replicated_axis(global_mesh, held_leaves, needs_whole=True)
        local = Path(os.path.abspath(os.fspath(local_directory)))
        # As Orbax's: with several slices it gives the state to a manager of one item.
        self._item = "default" if has_orbaxs_slices else items.STATE
        if has_orbaxs_slices and not local.exists():
            raise FileNotFoundError(f"{local} does not exist: create the local directory first")
        self._log: CheckpointLog | None = None
        self._config = self._config_of(local, logger)
        is_off = not options.local.read_only and "local" not in self._config.save_plans()
        if global_mesh is not None and self._axis is None and is_off:
            logging.warning(
                "the mesh has one slice: nothing is saved to RAM, as with Orbax. No axis of %s over"
                " several hosts has the whole state at each position; with one, such as data"
                " parallelism, a lost host's part is in the RAM of others. The setting"
                " local_save_every, or LocalCheckpointOptions(with_one_slice=True), saves"
                " one copy there, which is lost with its host",
                {name: size for name, size in global_mesh.shape.items() if size > 1},
            )
        self._run_id = run_id_of(str(self._directory))
        self._closed = False
        if not self._config.only_reads:
            self._close_open_one()
        self._checkpointer = EmergencyCheckpointer(self._config)
        if not self._config.only_reads:
            _open[self._run_id] = self
        self._survey()

    def _close_open_one(self) -> None:
        earlier = _open.get(self._run_id)
        if earlier is None:
            return
        logging.warning("a new manager of %s replaces the open one", self._directory)
        try:
            earlier.close()
        except CheckpointError as error:  # of its saves, and perhaps on this process alone
            logging.error("closing the former manager failed: %s", error)

    def _config_of(self, local: Path, logger: Any) -> Config:
        settings: dict[str, Any] = {
            "dir": str(self._directory),
            "local_dir": str(local),
            "mesh": self._global_mesh,
            **settings_of(self._options, one_slice=self._axis is None),
            "replica_axis": self._axis,
        }
        further = dict(getattr(self._options, "settings", {}))
        listeners: list[Any] = []
        callback = getattr(self._options.async_options, "post_finalization_callback", None)
        if callback is not None:

            def call_back(event: Event) -> None:
                if event.name == "persistent.complete":
                    callback()

            listeners.append(call_back)
        if logger is not None:
            from emergency_ckpt.extras.metrics import CheckpointLog  # noqa: PLC0415 - an extra

            directories = {name: settings[name] for name in ("dir", "local_dir")}
            self._log = CheckpointLog(logger, **directories)
            listeners.append(self._log)
        if listeners:
            further["on_event"] = [*listeners, *listeners_of(further.get("on_event"))]
        return Config().set(**with_further(settings, further))

    def _surveyed(self) -> CompleteSteps:
        """Return the complete steps of each tier, by what all processes hold. Collective."""
        return self._checkpointer.steps.survey(self._abstract_state)

    def _survey(self) -> None:
        """Count all complete steps as saved, so that none of them is due. Collective."""
        self._checkpointer.wait_until_finished()
        self._checkpointer.go_on_after(self._surveyed())

    @property
    def directory(self) -> epath.Path:
        """The persistent directory."""
        return self._directory

    @property
    def in_primary_slice(self) -> bool:
        """True when this process has devices in slice 0 of the mesh."""
        if self._axis is None or self._global_mesh is None:
            return True
        first = np.take(self._global_mesh.devices, 0, axis=self._axis)
        return any(device.process_index == jax.process_index() for device in first.flat)

    @property
    def global_mesh(self) -> jax.sharding.Mesh | None:
        """The mesh given to the constructor."""
        return self._global_mesh

    # Steps.

    def all_steps(self, read: bool | None = None) -> list[int]:
        """Return the complete steps of both tiers, oldest first.

        These are the steps that were there at the start or ``reload``, and those saved since. The
        list is equal on all processes that have no save in progress. The call does not block. With
        ``read=True`` the call returns the steps that are there now, is collective, and blocks.
        """
        steps = self._surveyed() if read else self._checkpointer.known_steps
        return sorted({*steps.local, *steps.persistent})

    def latest_step(self) -> int | None:
        """Return the newest complete step that is known; None when there is none. Not collective.

        Steps become known at the start, by ``reload``, by a restore, and by a completed save. A
        save in progress, or that failed, does not count.
        """
        known = self._checkpointer.known_steps
        return max((*known.local, *known.persistent), default=None)

    def best_step(self) -> int | None:
        """Return the step with the best metrics by ``best_fn``; ``latest_step()`` without that.

        None when no step has metrics. A step counts where some process can read its metrics: after
        the loss of a host, those of a step in RAM are with the others. The answer is the same on
        all processes. Collective; reads storage.
        """
        best_fn = getattr(self._options, "best_fn", None)
        if best_fn is None:
            return self.latest_step()
        steps, catalog = self.all_steps(read=True), self._checkpointer.steps
        return catalog.best(
            lambda: items.best_of(steps, catalog.describe, best_fn, self._options.best_mode)
        )

    def reload(self) -> None:
        """Read the directories again, also when they were emptied. Collective.

        Waits for saves in progress.
        """
        self._open_again_where_lost()
        self._survey()

    def _open_again_where_lost(self) -> None:
        """Open the local tier again, on all processes, if a directory in RAM was deleted."""
        if self._checkpointer.steps.ramdisks_intact():
            return
        logging.warning("a local directory was deleted: opening all of them again")
        self._checkpointer.stop(after_error=True)
        self._checkpointer = EmergencyCheckpointer(self._config)
        self._survey()

    def delete(self, step: int) -> None:
        """Remove ``step`` from both tiers. Collective; blocks.

        Raises:
          FileNotFoundError: there is no such step. CheckpointError: it could not be removed.
          InvalidState: ``step`` is not the number of a step.
        """
        step = step_number("delete", step)
        self._checkpointer.wait_until_finished()
        if step not in self.all_steps(read=True):
            raise FileNotFoundError(f"there is no step {step} in {self._directory} or in RAM")
        self._checkpointer.steps.remove(step)

    # Saving.

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` at ``step`` would start a save in a tier. Not collective."""
        return self._checkpointer.should_save(step)

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is being preempted and all processes act on it at ``step``."""
        if self._checkpointer.heeds_preemption:
            return self._checkpointer.reached_preemption(step)
        # JAX's own call raises when its service is off.
        return jax_hears_notices() and multihost_utils.reached_preemption_sync_point(step)

    def request_preemption(self) -> None:
        """Give notice of a preemption, as ``EmergencyCheckpointer.request_preemption``."""
        self._checkpointer.request_preemption()

    def save(
        self,
        step: int,
        args: ocp.args.Composite,
        *,
        metrics: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save in the tiers where a save is due; return True if one was started. Not collective.

        To be called by all processes after every step. Blocks for the previous save and for the
        device-to-host transfer. When it returns, the state may be donated and the iterator may move
        on.

        Args:
          args: ``Composite(state=PyTreeSave(x))``, optionally with ``dataset``: Grain's arguments,
            ``JsonSave``, or an object with ``get_state`` and ``set_state``.
          metrics: numbers, kept with the step; a dict also for preservation policies.
          force: save in every tier that is on, independent of its policy.
          custom_metadata: JSON values for ``metadata(step)``, equal on all processes.

        Raises:
          ValueError: ``args`` without ``state``, or with ``process_metadata`` or other items.
          InvalidState, HostStateError: a value cannot be saved.
          SaveFailed: without ``enable_async_checkpointing``, the save failed.
        """
        state = items.state_of(args)
        if not (force or self._checkpointer.should_save(step)):
            return False
        saved = self._checkpointer.save(
            step=step,
            state=state,
            host_state=items.host_state_of(args, custom_metadata, metrics),
            force=force,
            metrics=metrics if isinstance(metrics, Mapping) else None,
            orbax=OrbaxStep(
                items=(self._item,),
                metrics=plain_metrics(metrics),
                custom_metadata=plain_metrics(custom_metadata or {}, "custom_metadata"),
            ),
        )
        if not self._options.enable_async_checkpointing:
            self._checkpointer.check_for_errors()
        return saved

    def restore(
        self, step: int | None = None, args: ocp.args.Composite | None = None
    ) -> ocp.args.Composite:
        """Restore ``step``, or the newest complete one. Collective; blocks.

        Returns ``Composite`` with ``state``, of the structure, dtypes and shardings of
        ``abstract_state``; and with ``dataset`` if ``args`` has it: an object with ``set_state`` is
        repositioned in place, for JSON the value is returned. With ``partial_restore`` only the
        leaves of its ``item`` are returned, in its structure and shardings.

        Raises the same kind of error on all processes:
          FileNotFoundError: there is no such step, or none at all.
          ValueError: ``args`` request a transformation, or leaves that ``abstract_state`` lacks.
          StateMismatch: ``abstract_state`` differs from the saved state.
          HostStateError: no ``dataset`` was saved, or by another number of processes.
          Unrecoverable, RestoreFailed, DeadlineExceeded: as ``EmergencyCheckpointer.restore``.
        """
        target = items.target_for(args)
        state_target, part_of = items.restore_target(args, self._abstract_state)
        self._open_again_where_lost()
        try:
            restored_step, state = self._checkpointer.restore(
                step,
                state=state_target,
                host_state=target,
                tensors_only=target is None,  # as with Orbax, whose items are asked for
            )
        except StepNotFound as error:
            raise FileNotFoundError(str(error)) from error
        if restored_step is None:
            raise FileNotFoundError(f"there are no steps in {self._directory} nor in RAM")
        state = part_of(state)
        if target is None:
            return ocp.args.Composite(state=state)
        return ocp.args.Composite(state=state, dataset=items.dataset_in(target, restored_step))

    # Contents of a step.

    def item_metadata(self, step: int) -> ocp.args.Composite:
        """Return shapes and dtypes of the state of ``step``, as Orbax's ``ArrayMetadata``.

        In the structure of ``abstract_state`` when the leaves are the same, otherwise by path. Not
        collective: reads this process's RAM, or else storage; blocks. FileNotFoundError;
        InvalidState for what is not the number of a step.
        """
        description: Any = items.step_metadata(self._describe(step), self._abstract_state)
        return description.item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Return the ``StepMetadata`` of ``step``, or ``RootMetadata``. As ``item_metadata``."""
        if step is None:
            return ocp.metadata.RootMetadata(custom_metadata=dict(self._metadata))
        return items.step_metadata(self._describe(step), self._abstract_state)

    def metrics(self, step: int) -> Any:
        """Return the metrics given with ``step``, or None. As ``item_metadata``.

        None also for a step in RAM while storage, which has the metrics, does not answer.
        """
        return items.metrics_in(self._describe(step))

    def _describe(self, step: int) -> StepDescription:
        try:
            return self._checkpointer.steps.describe(step)
        except StepNotFound as error:
            raise FileNotFoundError(str(error)) from error

    # Waiting and ending.

    def wait_until_finished(self) -> None:
        """Return when this process has no save in progress. Raises the error of a failed save."""
        self._checkpointer.wait_until_finished()
        self._checkpointer.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise the newest error of a background save that was not raised before."""
        self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Finish the saves in progress and release all; raise a failed save's error. Idempotent."""
        self._close(after_error=False)

    def _close(self, *, after_error: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if _open.get(self._run_id) is self:
            del _open[self._run_id]
        try:
            self._checkpointer.stop(after_error=after_error)
        finally:
            if self._log is not None:
                self._log.close()
        self._checkpointer.check_for_errors()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        try:
            self._close(after_error=not is_good_end(error))
        except CheckpointError as failure:
            if is_success(error):
                raise
            logging.error("closing the manager failed: %s", failure)  # the block's matters more


def _slice_count(mesh: jax.sharding.Mesh, axis: int) -> int:
    """Return the number of slices along ``axis``; ValueError when ``axis`` is none of ``mesh``."""
    if mesh.devices.ndim == 1:
        return 1  # as in Orbax: no axis is left to be a replica axis
    if not 0 <= axis < mesh.devices.ndim:
        raise ValueError(f"replica_axis_index {axis} is no axis of the mesh {mesh.axis_names}")
    return mesh.devices.shape[axis]
