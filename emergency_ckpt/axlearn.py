"""``EmergencyCheckpointer`` for axlearn's trainer: both tiers behind its ``BaseCheckpointer``.

Written against axlearn's sources of July 2026. What its trainer does, and what follows from it:

- It saves after every step and leaves the policies to the checkpointer; the state is donated to the
  next step and the iterator moves on: both are captured before ``save`` returns.
- It takes any exception of ``restore`` for a warning and calls again with the iterator added or
  removed: so failures are those of all processes at once, the state's structure must be that of
  the checkpoint, iterators included, and a second call does what a first one would.
- It may end without ``wait_until_finished`` or ``stop``.

Process ids are not negotiated: any process may run on any host, under any number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt import checkpointer as core
from emergency_ckpt.cluster.preemption import is_good_end
from emergency_ckpt.config import Config as Settings
from emergency_ckpt.config import run_id_of
from emergency_ckpt.config.policies import PerProcessPolicy, SavePolicy
from emergency_ckpt.config.table import settings_table
from emergency_ckpt.config.validation import listeners_of
from emergency_ckpt.core.wording import few
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    MissingDependency,
    PersistentTierError,
)
from emergency_ckpt.events import Event
from emergency_ckpt.restore.request import RestoreReport
from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.state.tree import PyTree, path_of
from emergency_ckpt.storage.directory import StorageDirectory, written_for
from emergency_ckpt.storage.tier import DEFAULT_TIMEOUT_S, PersistentTier

__all__ = ["EmergencyCheckpointer"]


Entries = Sequence[tuple[str, Any]]
Leaves = Sequence[tuple[Any, Any]]
"""Of a state: each leaf's key path, and an ``_Array`` or what the index has in the leaf's place."""

_NAME = "index"
_STEP_NAME = re.compile(r"step_[0-9]{8}", re.ASCII)
_CHECK_S = 10.0
"""Longest look at the newest step of a directory."""


class _Array(NamedTuple):
    """An array without its values."""

    shape: Any
    dtype: Any


class Split(NamedTuple):
    """A state in parts: tensors, iterators by "/"-joined path, and what ``entries_of`` needs."""

    tensors: PyTree
    iterators: dict[str, Any]
    leaves: Leaves


def split(state: PyTree) -> Split:
    """Return the parts of ``state``. Nothing is copied.

    The tensors have a zero-size array in the place of each iterator: so a checkpoint that has an
    iterator where the state has none, or the reverse, differs in a leaf, by name.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    iterators: dict[str, Any] = {}
    tensors: list[object] = []
    leaves: list[tuple[Any, Any]] = []
    for key_path, leaf in flat:
        if _is_iterator(leaf):
            iterators[path_of(key_path)] = leaf
            tensors.append(np.empty(0, np.uint8))
            leaves.append((key_path, str(type(leaf))))
        else:
            tensors.append(leaf)
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            # The texts are made by ``entries_of``, since the training thread waits for this loop.
            leaves.append((key_path, _Array(leaf.shape, leaf.dtype) if is_array else leaf))
    return Split(treedef.unflatten(tensors), iterators, leaves)


def join(state: PyTree, tensors: PyTree) -> PyTree:
    """Return ``tensors`` in the structure of ``state``, with the iterators of ``state``."""
    flat, treedef = jax.tree_util.tree_flatten(state)
    arrays = jax.tree_util.tree_leaves(tensors)
    return treedef.unflatten(
        leaf if _is_iterator(leaf) else array for leaf, array in zip(flat, arrays, strict=True)
    )


def _is_iterator(leaf: object) -> bool:
    """Return True for a leaf with a state of its own, such as a data iterator."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return as_stateful(leaf) is not None


def step_name(step: int) -> str:
    """Return the folder in which axlearn's tools look for ``step``."""
    return f"step_{step:08d}"


def entries_of(step: int, leaves: Leaves) -> Entries:
    """Return the entries of the index for a state with these leaves.

    ``["step", 25]``, then ``[path, {"dtype": "float32", "shape": "(8, 16)"}]`` for each array and
    ``[path, type]`` for each iterator.
    """
    entries: list[tuple[str, Any]] = [("step", step)]
    for key_path, leaf in leaves:
        value = leaf
        if isinstance(leaf, _Array):
            dtype = getattr(leaf.dtype, "dtype", leaf.dtype)
            value = {"dtype": str(dtype), "shape": str(tuple(leaf.shape))}
        entries.append((path_of(key_path), value))
    return entries


class StepIndex:
    """The files ``step_00000025/index`` of a directory: axlearn's tools find the steps by them.

    Nothing in this package reads them: the persistent tier's own marker says what counts. A folder
    in which axlearn's own ``Checkpointer`` has more than an index is that checkpointer's: nothing
    there is written or removed. Blocks for storage.
    """

    def __init__(self, directory: str) -> None:
        self._storage = StorageDirectory(directory, DEFAULT_TIMEOUT_S)

    def write(self, step: int, entries: Entries) -> None:
        """Write the index of ``step``, all of it or nothing. PersistentTierError."""
        data = json.dumps(list(entries)).encode()
        if others := self._others_in(step):
            raise PersistentTierError(
                "write",
                f"{self._storage.path}/{step_name(step)}/{_NAME}",
                f"another checkpointer has {few(others)} there",
                hint="give this checkpointer a directory of its own",
            )
        self._storage.create_folder(step_name(step))
        self._storage.put(f"{step_name(step)}/{_NAME}", data)

    def remove(self, step: int) -> None:
        """Remove the index of ``step``, if it has one. PersistentTierError."""
        path = self._storage.path / step_name(step)
        if self._others_in(step):
            return

        def clear() -> None:
            (path / _NAME).unlink(missing_ok=True)
            if self._storage.is_object_store:
                self._storage.delete_empty_folders([f"{path.name}/{_NAME}"])
            else:
                with contextlib.suppress(OSError):  # it is gone, or something came there meanwhile
                    path.rmdir()

        self._storage.do("remove", f"/{path.name}", clear)

    def check(self) -> None:
        """Refuse a directory whose newest step is one of axlearn's own ``Checkpointer``.

        ConfigError: this checkpointer would not restore that step, and train from the beginning.
        While storage does not answer, nothing is refused.
        """
        deadline_s = time.monotonic() + _CHECK_S
        try:
            names = self._storage.names_in(deadline_s=deadline_s)
            newest = max(filter(_STEP_NAME.fullmatch, names), default="")
            others = self._others_in(int(newest.removeprefix("step_"))) if newest else []
        except PersistentTierError as error:
            logging.warning("the steps of axlearn's tools cannot be looked at: %s", error)
            return
        if others:
            problem = f"{self._storage.path} has {newest}/{others[0]} of another checkpointer"
            raise ConfigError([f"{problem}, whose steps are not restored: give another directory"])

    def _others_in(self, step: int) -> list[str]:
        """Return the names beside the index of ``step``, but for files of writers that died."""
        names = self._storage.names_in(step_name(step))
        return sorted(name for name in names if _NAME not in (name, written_for(name)))


try:
    from axlearn.common.checkpointer import (
        BaseCheckpointer,
        CheckpointPolicy,
        every_n_steps_policy,
    )
    from axlearn.common.config import (
        REQUIRED,
        InstantiableConfig,
        Required,
        config_class,
        config_for_function,
    )
    from axlearn.common.module import Module
except ImportError as missing:
    raise MissingDependency(
        "import",
        "emergency_ckpt.axlearn",
        f"axlearn is not installed, or too old ({missing})",
        hint="install axlearn from its sources; the version on PyPI has no BaseCheckpointer",
    ) from missing


_TENSORS = "tensors"
_STOP_AFTER_ERROR_TIMEOUT_S = 10.0
_OWN = {
    *("dir", "run_id", "mesh", "replica_axis", "keep_every_n_steps"),
    *("save_every", "local_save_every", "preservation_policy"),
    *("stall_timeout_s", "total_timeout_s"),
}
"""Settings that axlearn has in a form of its own, which ``_settings_of`` turns into ours."""
_SAME = [row for row in settings_table(Settings) if row.name not in _OWN]

C = TypeVar("C", bound=type)


def _with_settings(config: C) -> C:
    """Add a field to ``config`` for each setting that axlearn's has in the same form."""
    for row in _SAME:
        if row.name not in config.__annotations__:
            config.__annotations__[row.name] = row.annotation
            setattr(config, row.name, row.default)
    return config


class EmergencyCheckpointer(BaseCheckpointer):
    """Keeps the trainer's state in RAM every few steps and in storage now and then.

    Construction waits for nobody. ``restore`` must be called by all processes, ``save`` by all at
    the same steps; the first of these calls starts the checkpointer, which is collective too.

    ``<dir>/tensors`` has the persistent steps in Orbax's format with the iterators beside them,
    ``<dir>/step_<8 digits>/index`` what axlearn's tools look for.
    """

    @config_class
    @_with_settings
    class Config(BaseCheckpointer.Config):
        """The settings; must be equal on all processes but where ``emergency_ckpt.config`` says so.

        Attributes:
          save_policy, local_save_policy: when to save to storage and to RAM. Called once per step,
            with ``step`` and ``evaler_summaries``; must decide alike on all processes.
          keep_last_n: steps kept in storage.
          keep_every_n_steps: steps kept in storage besides: the multiples of this; 0 or None: none.
          local_keep_last_n: steps kept in RAM, besides the one being written.
          local_save_every_n_seconds, save_every_n_seconds: besides the policies: as soon as the
            save before is whole, but not sooner than so many seconds after it; None: not at all.
          local_dir: directory on this host's ramdisk (tmpfs); must outlive the process.
          trainer_dir: names the run: what lies in ``local_dir`` of another run is never restored.
            axlearn's launcher fills it in.
          non_tensor_async_timeout_secs: how long a save to RAM may wait for all processes: twice
            the setting ``stall_timeout_s``.
          async_timeout_secs: how long a save to storage or a restore may take, where that is longer
            than the default of the setting ``total_timeout_s``.
          replica_axis_index: index of the mesh axis along which slices are replicas.
          host_state_remap: a function that makes a process's iterator states out of those of a job
            of another size: from a list of dicts by path to a dict by path.

        All others are those of ``emergency_ckpt.config.Config``, with its names and defaults.
        ``on_preemption`` is "exit": the trainer itself does nothing about a notice.
        """

        keep_last_n: int = 1
        keep_every_n_steps: int | None = None
        local_keep_last_n: int = 1
        local_save_policy: InstantiableConfig[CheckpointPolicy] = config_for_function(
            every_n_steps_policy
        ).set(n=10)
        local_dir: str = "/host-tmp/checkpoints"
        trainer_dir: Required[str] = REQUIRED
        non_tensor_async_timeout_secs: int = 300
        async_timeout_secs: int = 3600
        replica_axis_index: Required[int] = REQUIRED
        # Ours.
        local_save_every_n_seconds: int | None = None
        save_every_n_seconds: int | None = None
        on_preemption: str = "exit"

        if TYPE_CHECKING:  # the fields of ``_with_settings``

            def __getattr__(self, name: str) -> Any: ...
            def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        """Raises ConfigError, with every fault. As all of axlearn's modules: from its config.

        Blocks for a look at the directory in storage.
        """
        super().__init__(cfg, parent=parent)
        filled_in: Any = self.config
        self._policies = _Asked(filled_in.local_save_policy), _Asked(filled_in.save_policy)
        self._settings = _settings_of(filled_in, *self._policies)
        self._settings.validated()
        self._settings.set(on_event=[self._keep_index, *listeners_of(filled_in.on_event)])
        self._index = StepIndex(filled_in.dir)
        self._index.check()
        self._leaves: Leaves = ()
        """Of the newest state that was given to a save; the states before it have the same."""
        self._running: core.EmergencyCheckpointer | None = None

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """The complete steps in storage under ``base_dir``, oldest first. Blocks for storage."""
        return [
            step.step
            for step in PersistentTier(os.path.join(base_dir, _TENSORS)).found.counting()
            if step.process_count
        ]

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        """``ckpt_dir`` of each of ``checkpoint_steps``."""
        return [os.path.join(base_dir, step_name(step)) for step in cls.checkpoint_steps(base_dir)]

    def ckpt_dir(self, step: int, dir: str | None = None) -> str:
        """The directory with the index of ``step``."""
        return os.path.join(self.config.dir if dir is None else dir, step_name(step))

    @property
    def last_restore(self) -> RestoreReport | None:
        """Report of the last restore on this process; None before one that found a step."""
        return None if self._running is None else self._running.last_restore

    def save(
        self, *, step: int, state: PyTree, evaler_summaries: dict[str, Any] | None = None
    ) -> None:
        """Save in the tiers whose policies say so.

        As ``emergency_ckpt.EmergencyCheckpointer.save``. Errors of the background part do not end
        training; ``wait_until_finished`` raises them.
        """
        for policy in self._policies:
            policy.summaries = evaler_summaries or {}
        running = self._running or self._start(state)
        if not running.should_save(step):
            return
        tensors, iterators, self._leaves = split(state)
        running.save(step=step, state=tensors, host_state=iterators or None)

    def restore(self, *, step: int | None = None, state: PyTree) -> tuple[int | None, PyTree]:
        """Bring back the newest complete step, or just ``step``. Collective; blocks.

        As ``emergency_ckpt.EmergencyCheckpointer.restore``: iterators in ``state`` are
        repositioned in place; (None, ``state``) when there is nothing.

        Raises, on all processes, having moved no iterator:
          StepNotFound: a ValueError; there is no such step.
          StateMismatch: a ValueError; arrays or iterators are not those of the checkpoint.
          Any other error of ``emergency_ckpt.errors``.
        """
        running = self._running or self._start(state)
        tensors, iterators, _ = split(state)
        restored_step, restored = running.restore(step, state=tensors, host_state=iterators or None)
        return (None, state) if restored_step is None else (restored_step, join(state, restored))

    def wait_until_finished(self) -> None:
        """Return when no save is under way; raises the newest error of one. Not collective."""
        if self._running is not None:
            self._running.wait_until_finished()
            self._running.check_for_errors()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop as after no exception where ``sys.exit`` ends a training that went well."""
        super().__exit__(None if is_good_end(exc) else exc_type, exc, traceback)

    def request_preemption(self) -> None:
        """Give notice of a preemption, as ``EmergencyCheckpointer.request_preemption``.

        CheckpointError: before the first ``save`` or ``restore``, and after ``stop``.
        """
        if self._running is None:
            raise CheckpointError("request", "a preemption save", "the checkpointer does not run")
        self._running.request_preemption()

    def stop(self, *, has_exception: bool = False) -> None:
        """Finish the saves under way, after an exception only what ends soon. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        if not has_exception:
            running.stop()
            return
        try:
            running.stop(timeout_s=_STOP_AFTER_ERROR_TIMEOUT_S, after_error=True)
        except DeadlineExceeded as error:
            # The others may have died: what is under way can never become whole.
            logging.error("stopped after an exception: %s", error)

    def _start(self, state: PyTree) -> core.EmergencyCheckpointer:
        self._running = core.EmergencyCheckpointer(self._settings, mesh=_mesh_of(state))
        return self._running

    def _keep_index(self, event: Event) -> None:
        """Let axlearn's tools find the steps of storage. In the threads of the saves.

        RAM may give storage a step long after ``save``, whose state is gone by then.
        """
        step = event.fields.get("step")
        if not isinstance(step, int):
            return
        if event.point == "persistent.stage.published":
            self._index.write(step, entries_of(step, self._leaves))
        elif event.point == "persistent.removal.begun":
            self._index.remove(step)


class _Asked:
    """axlearn's policy in the form of Orbax's, which is asked once a step on every process."""

    def __init__(self, config: InstantiableConfig[CheckpointPolicy]) -> None:
        self._policy = config.instantiate()
        self.summaries: dict[str, Any] = {}

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Return the policy's answer, given the last summaries of the evalers."""
        return bool(self._policy(step=step.step, evaler_summaries=self.summaries))


def _settings_of(cfg: Any, local: _Asked, persistent: _Asked) -> Settings:
    """``cfg``: a config of ``EmergencyCheckpointer`` with all that is required."""
    settings = Settings(
        dir=os.path.join(cfg.dir, _TENSORS),
        run_id=run_id_of(cfg.trainer_dir),
        replica_axis=cfg.replica_axis_index,
        local_save_every=_policy_of(local, cfg.local_save_every_n_seconds),
        save_every=_policy_of(persistent, cfg.save_every_n_seconds),
        keep_every_n_steps=cfg.keep_every_n_steps or None,
        stall_timeout_s=cfg.non_tensor_async_timeout_secs / 2,
        # A shorter limit would also end restores, which have none in axlearn.
        total_timeout_s=max(float(cfg.async_timeout_secs), Settings().total_timeout_s),
    )
    return settings.set(**{row.name: getattr(cfg, row.name) for row in _SAME})


def _policy_of(asked: _Asked, every_n_seconds: int | None) -> SavePolicy:
    if every_n_seconds is None:
        return cast("SavePolicy", PerProcessPolicy(asked))
    continuous = ocm.ContinuousCheckpointingPolicy(minimum_interval_secs=every_n_seconds)
    return cast("SavePolicy", PerProcessPolicy(ocm.AnySavePolicy([asked, continuous])))


def _mesh_of(state: PyTree) -> jax.sharding.Mesh | None:
    for leaf in jax.tree_util.tree_leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            if isinstance(mesh, jax.sharding.Mesh):
                return mesh
    return None
