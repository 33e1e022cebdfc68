"""``training`` of Orbax v1 (0.12.8), whose ``Checkpointer`` also saves to the RAM of the hosts.

Storage is Orbax's own: its ``Checkpointer`` writes, lists and reads the steps there, so each of
its options and handlers works, and plain Orbax v1 goes on from the same directory.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.experimental.v1.training import Checkpointer as OrbaxsCheckpointer
from orbax.checkpoint.experimental.v1.training import (
    CheckpointMetadata,
    RootMetadata,
    errors,
    pathways,
    preservation_policies,
    save_decision_policies,
)

from emergency_ckpt.checkpointer import EmergencyCheckpointer
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.config.settings import default_local_dir
from emergency_ckpt.core.save.save_rules import plain_metrics
from emergency_ckpt.errors import InvalidState, StateMismatch, StepNotFound
from emergency_ckpt.orbax.saved_tree import nested
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.state.tree import describe

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "pathways",
    "preservation_policies",
    "save_decision_policies",
]

_STATE = "state"
"""Orbax's name of a checkpointable that was given none."""


class _Parts(NamedTuple):
    """The checkpointables of one call, as the RAM tier keeps them.

    Attributes:
      trees: with arrays and numbers, by name.
      others: objects with ``get_state`` and ``set_state``, by name.
      unfit: why the RAM tier cannot keep all of them; empty when it can.
    """

    trees: dict[str, Any]
    others: dict[str, Any]
    unfit: str = ""


class _Saved(NamedTuple):
    """The last save to RAM that this process began. ``kept``: its host state."""

    step: int
    begun_ns: int
    kept: Mapping[str, Any]


class RamResponse:
    """A save that only the RAM tier has begun: Orbax's ``AsyncResponse[bool]``."""

    def __init__(self, ram: EmergencyCheckpointer) -> None:
        self._ram = ram

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the save; return True. Blocks.

        DeadlineExceeded: longer than ``timeout`` seconds. SaveFailed: the save failed.
        """
        self._ram.wait_until_finished(timeout)
        self._ram.check_for_errors()
        return True

    def on_complete(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` with True, on a thread of its own, when the save is complete."""
        threading.Thread(target=lambda: callback(self.result()), daemon=True).start()


class Checkpointer:
    """Orbax v1's ``Checkpointer``, and a RAM tier beside it.

    All processes must call the constructor, ``load``, ``delete``, ``reload`` and ``close``, in the
    same order, and ``save`` at the same steps; from one thread.

    A save to RAM takes trees of arrays and numbers, and objects with ``get_state`` and
    ``set_state``. Where a step has another checkpointable, it is saved to storage alone, with one
    warning. ``load`` takes a step from RAM when it is whole there on all processes together, no
    older than the newest of storage, and asked for as it was saved, with abstract trees that have
    shardings; otherwise Orbax loads it from storage. The RAM tier is on in jobs of
    several processes, and where ``local_directory`` or ``settings`` are given.

    Differences from Orbax's: ``save`` and ``save_async`` say True also for a step that was saved to
    RAM alone, and ``checkpoints`` and ``latest`` name the newest step in RAM, whose time is when
    this process began to save it, or found it. Policies say what
    is saved to storage; ``local_save_every`` of ``settings`` what to RAM. A step that both save
    leaves the devices twice.

    Args:
      local_directory: on this host's ramdisk; None: the environment's ECKPT_LOCAL_DIR, else
        ``/dev/shm/eckpt``. It is created if it does not exist.
      settings: further settings of ``emergency_ckpt.config.Config``, by name, without ``dir``.
      others: as Orbax's.

    Raises:
      ConfigError, LocalTierError, RestoreFailed, DeadlineExceeded: as ``EmergencyCheckpointer``.
      Otherwise as Orbax's.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        local_directory: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given = dict(settings or {})
        if "dir" in given:
            raise ValueError("settings without 'dir': Orbax's Checkpointer has the directory")
        self._storage = OrbaxsCheckpointer(
            cast("Any", directory),
            context=context,
            save_decision_policy=save_decision_policy,
            preservation_policy=preservation_policy,
            step_name_format=step_name_format,
            custom_metadata=custom_metadata,
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            logger=logger,
        )
        self._ram: EmergencyCheckpointer | None = None
        self._found, self._found_ns = CompleteSteps(), time.time_ns()
        self._saved: _Saved | None = None
        self._is_warned = False
        names = step_name_format or ocp.path.step.standard_name_format()
        self._name_of: Callable[[int], str] = names.build_name
        if jax.process_count() > 1 or local_directory is not None or settings:
            self._ram = self._open_ram(local_directory, given)
            self._survey()

    def _open_ram(
        self, local_directory: str | os.PathLike[str] | None, given: dict[str, Any]
    ) -> EmergencyCheckpointer:
        local = os.path.abspath(os.fspath(local_directory or default_local_dir(os.environ)))
        os.makedirs(local, mode=0o700, exist_ok=True)
        base: dict[str, Any] = {
            "local_dir": local,
            "run_id": run_id_of(os.fspath(self.directory)),
            # Orbax's policy saves at a preemption, to storage.
            "save_on_preemption": False,
        }
        return EmergencyCheckpointer(Config().set(**{**base, **given}))

    def _survey(self) -> None:
        """Learn the steps that RAM has, on all processes together. Collective."""
        if self._ram is not None:
            self._found, self._found_ns = self._ram.steps.survey(()), time.time_ns()

    # Steps.

    @property
    def directory(self) -> Any:
        """The directory in storage."""
        return self._storage.directory

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The known steps of both tiers, oldest first; of RAM the newest. No IO; not collective."""
        stored = list(self._storage.checkpoints)
        newest = self._newest_in_ram()
        if newest is None or any(each.step >= newest for each in stored):
            return stored
        return [*stored, self._of_ram(newest)]

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest of ``checkpoints``; None without any."""
        known = self.checkpoints
        return known[-1] if known else None

    def _newest_in_ram(self) -> int | None:
        if self._ram is None:
            return None
        return max((*self._found.local, *self._ram.known_steps.local), default=None)

    def _of_ram(
        self, step: int, metadata: Any = None, kept: Mapping[str, Any] | None = None
    ) -> CheckpointMetadata[Any]:
        saved = self._saved if self._saved and self._saved.step == step else None
        kept = kept or (saved.kept if saved else {})
        return CheckpointMetadata[Any](
            step,
            path=self.directory / self._name_of(step),
            metadata=metadata,
            commit_timestamp_nsecs=saved.begun_ns if saved else self._found_ns,
            custom_metadata=kept.get("custom_metadata"),
            metrics=kept.get("metrics"),
        )

    # Saving.

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` at ``step`` would start a save in a tier."""
        in_ram = self._ram is not None and self._ram.should_save(_number(step))
        return self._storage.should_save(_number(step)) or in_ram

    def save(self, step: int, state: Any, **keywords: Any) -> bool:
        """Save ``state`` where it is due, and wait; return whether it was. As Orbax's."""
        response = self.save_async(step, state, **keywords)
        return response is not None and response.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = _STATE, **keywords: Any
    ) -> Any:
        """Begin to save ``state``; return Orbax's ``AsyncResponse``, None when nothing is due."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **keywords)

    def save_checkpointables(
        self, step: int, checkpointables: dict[str, Any], **keywords: Any
    ) -> bool:
        """Save ``checkpointables`` where it is due, and wait; return whether it was."""
        response = self.save_checkpointables_async(step, checkpointables, **keywords)
        return response is not None and response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> Any:
        """Begin to save; return Orbax's ``AsyncResponse[bool]``, None when no tier is due.

        When it returns, the state may be donated. A failure of the RAM tier does not end it: it is
        logged, and counted by ``eckpt report``.

        Raises:
          StepAlreadyExistsError, ValueError, TypeError: as Orbax's.
        """
        response = self._storage.save_checkpointables_async(
            step,
            dict(checkpointables),  # Orbax adds the metrics to it
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )
        in_ram = self._save_to_ram(
            _number(step), checkpointables, metrics, custom_metadata, force=force
        )
        if response is not None or in_ram is None:
            return response
        return in_ram

    def _save_to_ram(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        metrics: Any,
        custom_metadata: Any,
        *,
        force: bool,
    ) -> RamResponse | None:
        ram = self._ram
        if ram is None or not (force or ram.takes_every_step or ram.should_save(step)):
            return None
        parts = _parts_of(checkpointables)
        if parts.unfit:
            if not self._is_warned:
                logging.warning("steps are not saved to RAM: %s", parts.unfit)
            self._is_warned = True
            return None
        host_state = {
            "others": parts.others,
            "metrics": plain_metrics(metrics),
            "custom_metadata": custom_metadata,
        }
        saved = ram.save(step=step, state=parts.trees, host_state=host_state, force=force)
        if not saved:
            return None
        self._saved = _Saved(step, time.time_ns(), host_state)
        return RamResponse(ram)

    def cancel(self, step: Any = None) -> None:
        """Cancel a save to storage, and remove what it has of ``step``. As Orbax's."""
        self._storage.cancel(step)

    # Loading.

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = _STATE
    ) -> Any:
        """Load ``step``, or the newest, from RAM or else from storage. Collective; blocks.

        Raises:
          StepNotFoundError: no tier has the step. Otherwise as ``load_checkpointables``.
        """
        found = self.load_checkpointables(step, {checkpointable_name: abstract_state})
        return found[checkpointable_name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load the checkpointables of ``step``, or of the newest, by name. Collective; blocks.

        Raises:
          StepNotFoundError: no tier has the step.
          ValueError: it is in RAM alone, and the abstract trees are not given, or not all.
          StateMismatch, HostStateError, Unrecoverable, RestoreFailed, DeadlineExceeded: of a step
            in RAM, as ``EmergencyCheckpointer.restore``. Otherwise as Orbax's.
        """
        wanted = None if step is None else _number(step)
        if self._ram is not None:
            self._ram.wait_until_finished()
            self._survey()
            in_ram, stored = self._choose(wanted)
            if in_ram is not None:
                restored = self._from_ram(self._ram, in_ram, stored, abstract_checkpointables)
                if restored is not None:
                    return restored
            self._go_on_from_storage(self._ram, stored if wanted is None else wanted)
        return self._storage.load_checkpointables(
            cast("Any", wanted), cast("Any", abstract_checkpointables)
        )

    def _choose(self, wanted: int | None) -> tuple[int | None, int | None]:
        """Return the step to take from RAM, and the newest in storage; the same on all."""
        steps = [each.step for each in self._storage.checkpoints]
        if wanted is not None:
            there = wanted if wanted in self._found.local else None
            stored = wanted if wanted in steps else None
            return there, _of_first_process(stored)
        stored = _of_first_process(max(steps, default=None))
        newest = max(self._found.local, default=None)
        if newest is None or (stored is not None and stored > newest):
            return None, stored
        return newest, stored

    def _from_ram(
        self,
        ram: EmergencyCheckpointer,
        step: int,
        stored: int | None,
        abstract: Mapping[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Return the step from RAM; None when it is left to storage, which has it too."""
        parts = _parts_of({} if abstract is None else abstract)
        if abstract is None or parts.unfit:
            why = parts.unfit or "no abstract checkpointables are given"
            if stored == step:
                return None
            raise ValueError(
                f"step {step} is in RAM alone, and cannot be loaded from there: {why}."
                " Give each tree as arrays or jax.ShapeDtypeStruct with shardings"
            )
        host_state = {"others": parts.others, "metrics": None, "custom_metadata": None}
        try:
            _, trees = ram.restore(step, state=parts.trees, host_state=host_state)
        except StateMismatch:
            if stored != step:
                raise
            return None  # a part of the step may be asked for, which Orbax can load
        return {**trees, **parts.others}

    def _go_on_from_storage(self, ram: EmergencyCheckpointer, step: int | None) -> None:
        """Storage's step is loaded: it continues what RAM has, unless RAM has newer ones."""
        known = sorted({*self._found.local, *ram.known_steps.local})
        if step is not None and step >= max(known, default=-1):
            ram.go_on_after(CompleteSteps(tuple(known)))

    def load_async(self, step: Any = None, abstract_state: Any = None) -> Any:
        """Orbax has no such load yet: NotImplementedError."""
        return self._storage.load_async(step, abstract_state)

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> Any:
        """Orbax has no such load yet: NotImplementedError."""
        return self._storage.load_checkpointables_async(step, abstract_checkpointables)

    # Contents.

    def metadata(self, step: Any = None) -> Any:
        """Return the metadata of a step, the newest without one. Not collective. As Orbax's.

        Of a step in RAM alone it has the leaves as ``jax.ShapeDtypeStruct``, in dicts by their
        paths, where this process holds a part of the step.
        """
        found = self._described(step)
        if found is None:
            return self._storage.metadata(step)
        kept = {"metrics": found.metrics, "custom_metadata": found.custom_metadata}
        return self._of_ram(found.step, found.metadata.get(_STATE, found.metadata), kept)

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """Return the metadata of a step's checkpointables, by name. As ``metadata``."""
        found = self._described(step)
        return self._storage.checkpointables_metadata(step) if found is None else found

    def _described(self, step: Any) -> Any:
        """Return the metadata of a step in RAM alone; None of any other."""
        latest = self.latest
        if step is None and latest is None:
            return None
        number = _number(latest if step is None else step)
        is_stored = any(each.step == number for each in self._storage.checkpoints)
        if self._ram is None or is_stored or number != self._newest_in_ram():
            return None
        try:
            there = self._ram.steps.describe(number)
        except StepNotFound as error:
            raise errors.StepNotFoundError(f"step {number} is in RAM of others: {error}") from error
        trees = nested({leaf.path: leaf for leaf in there.leaves})
        kept = there.host_state if isinstance(there.host_state, dict) else {}
        return self._of_ram(number, trees, kept)

    def root_metadata(self) -> RootMetadata:
        """Return the directory and the metadata of the run. As Orbax's."""
        return self._storage.root_metadata()

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Remove ``step`` from both tiers, or one checkpointable from storage. Collective; blocks.

        Return whether anything was removed. Raises as Orbax's, where no tier has the step.
        """
        was_in_ram = self._remove_from_ram(step, checkpointable_name)
        return (
            self._storage.delete(
                step, checkpointable_name=checkpointable_name, missing_ok=missing_ok or was_in_ram
            )
            or was_in_ram
        )

    def delete_async(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> Any:
        """Remove ``step`` from RAM, and begin to remove it from storage. Collective.

        The response tells whether storage had it.
        """
        was_in_ram = self._remove_from_ram(step, checkpointable_name)
        return self._storage.delete_async(
            step, checkpointable_name=checkpointable_name, missing_ok=missing_ok or was_in_ram
        )

    def _remove_from_ram(self, step: Any, checkpointable_name: str | None) -> bool:
        """Remove a whole step; return whether RAM had it. One checkpointable stays there."""
        if self._ram is None or checkpointable_name is not None:
            return False
        self._ram.wait_until_finished()
        self._survey()
        if _number(step) not in self._found.local:
            return False
        self._ram.steps.remove(_number(step))
        self._survey()
        return True

    def reload(self) -> None:
        """Read the directories again. Collective."""
        self._storage.reload()
        self._survey()

    # Waiting and ending.

    def is_saving_in_progress(self) -> bool:
        """Return whether a save to storage is in progress here. Not collective."""
        return self._storage.is_saving_in_progress()

    def wait(self) -> None:
        """Wait for the saves and deletions in progress. Blocks; raises their errors."""
        self._storage.wait()
        if self._ram is not None:
            self._ram.wait_until_finished()
            self._ram.check_for_errors()

    def close(self) -> None:
        """Wait, and release everything. All processes should call it."""
        try:
            self._storage.close()
        finally:
            if self._ram is not None:
                self._ram.stop()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Names that Orbax has deprecated.

    def save_pytree(self, *args: Any, **keywords: Any) -> bool:
        """Deprecated name of ``save``."""
        _deprecated("save")
        return self.save(*args, **keywords)

    def save_pytree_async(self, *args: Any, **keywords: Any) -> Any:
        """Deprecated name of ``save_async``."""
        _deprecated("save_async")
        return self.save_async(*args, **keywords)

    def load_pytree(self, *args: Any, **keywords: Any) -> Any:
        """Deprecated name of ``load``."""
        _deprecated("load")
        return self.load(*args, **keywords)

    def load_pytree_async(self, *args: Any, **keywords: Any) -> Any:
        """Deprecated name of ``load_async``."""
        _deprecated("load_async")
        return self.load_async(*args, **keywords)

    def pytree_metadata(self, *args: Any, **keywords: Any) -> Any:
        """Deprecated name of ``metadata``."""
        _deprecated("metadata")
        return self.metadata(*args, **keywords)


def _parts_of(checkpointables: Mapping[str, Any]) -> _Parts:
    trees: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in checkpointables.items():
        if as_stateful(value) is not None:
            others[name] = value
            continue
        try:
            found = describe({name: value}, "save")
        except InvalidState as error:
            return _Parts({}, {}, f"{name!r}: {error}")
        if value is None or not found.leaves:
            return _Parts({}, {}, f"{name!r} is no tree of arrays")
        trees[name] = value
    if not trees:
        return _Parts({}, {}, "there are no trees of arrays")
    return _Parts(trees, others)


def _number(step: Any) -> int:
    """Return the number of a step, which Orbax also takes as its ``CheckpointMetadata``."""
    return int(step.step) if isinstance(step, CheckpointMetadata) else int(step)


def _of_first_process(step: int | None) -> int | None:
    """Return what process 0 gives: listings of storage may differ. Collective."""
    if jax.process_count() == 1:
        return step
    found = int(multihost_utils.broadcast_one_to_all(np.int64(-1 if step is None else step)))
    return None if found < 0 else found


def _deprecated(instead: str) -> None:
    warnings.warn(f"Use `{instead}` instead.", DeprecationWarning, stacklevel=3)
