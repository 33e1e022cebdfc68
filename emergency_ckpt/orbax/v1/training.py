"""``training`` of Orbax v1 (0.12.8), whose ``Checkpointer`` also saves to the RAM of the hosts.

Storage is Orbax's own, so plain Orbax v1 goes on from the same directory.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.experimental.v1.training import Checkpointer as OrbaxsCheckpointer
from orbax.checkpoint.experimental.v1.training import (
    CheckpointMetadata,
    RootMetadata,
    errors,
    pathways,
    preservation_policies,
    save_decision_policies,
)

from emergency_ckpt.cluster.preemption import is_good_end
from emergency_ckpt.errors import StepNotFound
from emergency_ckpt.orbax.plain_items import Given, saved
from emergency_ckpt.orbax.ram_beside import Items, RamBeside
from emergency_ckpt.state.host_state_codec import as_stateful

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "pathways",
    "preservation_policies",
    "save_decision_policies",
]

T = TypeVar("T")

_STATE = "state"
"""Orbax's name of a checkpointable that was given none."""


def _deprecated_name_of(method: str) -> Callable[..., Any]:
    def deprecated(self: Checkpointer, *args: Any, **keywords: Any) -> Any:
        warnings.warn(f"Use `{method}` instead.", DeprecationWarning, stacklevel=2)
        return getattr(self, method)(*args, **keywords)

    return deprecated


class RamResponse:
    """A save that only the RAM tier has begun: Orbax's ``AsyncResponse[bool]``."""

    def __init__(self, outcome: Callable[[float | None], bool]) -> None:
        self._outcome = outcome

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the save; return whether the whole step came into RAM. Blocks.

        DeadlineExceeded: longer than ``timeout`` seconds.
        """
        return self._outcome(timeout)

    def on_complete(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` with the result, on a thread of its own, when the save has ended."""
        threading.Thread(target=lambda: callback(self.result()), daemon=True).start()


class Checkpointer:
    """Orbax v1's ``Checkpointer``, and a RAM tier beside it.

    All processes must call the constructor, ``load``, ``delete``, ``cancel``, ``reload`` and
    ``close``, in the same order, and ``save`` at the same steps; from one thread.

    Every method that this class does not define is Orbax's own. The RAM tier is on in jobs of
    several processes, and where ``local_directory`` or ``settings`` are given. A save to RAM takes
    trees of arrays and numbers, and objects with ``get_state`` and ``set_state``; a step with
    another checkpointable is saved to storage alone, with one warning. An error of the RAM tier is
    a warning and the event ``ram.off``; from then on this class is Orbax's alone.
    docs/migrating_orbax.md lists the differences from Orbax's class.

    ``is_saving_in_progress`` says nothing of a save to RAM, for the reasons in the docstring of
    ``orbax.checkpoint.CheckpointManager``; ``wait`` waits for both tiers.

    Args:
      local_directory: on this host's ramdisk; None: the environment's ECKPT_LOCAL_DIR, else
        ``/dev/shm/eckpt-<user id>``. The directory is created if it does not exist.
      settings: further settings of ``emergency_ckpt.config.Config``, by name, without ``dir``.
      step_name_format, keywords: as Orbax's.

    Raises:
      ConfigError: a setting is wrong. Otherwise as Orbax's.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        step_name_format: Any = None,
        local_directory: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self._storage = storage = OrbaxsCheckpointer(
            cast("Any", directory), step_name_format=step_name_format, **keywords
        )
        self._ram = RamBeside(
            self.directory,
            lambda: [checkpoint.step for checkpoint in storage.checkpoints],
            local_directory=local_directory,
            settings=settings,
        )
        self._times_ns: dict[int, int] = {}
        """When this process began to save RAM's newest step, or found the step."""
        names = step_name_format or ocp.path.step.standard_name_format()
        self._name_of: Callable[[int], str] = names.build_name

    def __getattr__(self, name: str) -> Any:
        """Return the public part of Orbax's checkpointer that this class has not."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._storage, name)

    # Steps.

    @property
    def directory(self) -> Any:
        """The directory in storage."""
        return self._storage.directory

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The known steps of both tiers, oldest first; of RAM the newest, where it is newer.

        As of the constructor, ``reload``, ``load`` and ``wait``. The time of RAM's step is when
        this process began to save the step, or found the step. No IO; not collective.
        """
        stored, newest = list(self._storage.checkpoints), self._ram.newest
        return stored if newest is None else [*stored, self._of_ram(newest, None, {})]

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest of ``checkpoints``; None without any."""
        known = self.checkpoints
        return known[-1] if known else None

    def _of_ram(self, step: int, metadata: Any, kept: Mapping[str, Any]) -> CheckpointMetadata[Any]:
        return CheckpointMetadata[Any](
            step,
            path=self.directory / self._name_of(step),
            metadata=metadata,
            commit_timestamp_nsecs=self._times_ns.setdefault(step, time.time_ns()),
            custom_metadata=kept.get("custom_metadata"),
            metrics=kept.get("metrics"),
        )

    # Saving.

    def save(self, step: int, state: Any, **keywords: Any) -> bool:
        """Save ``state`` where it is due, and wait; return whether it was. As Orbax's."""
        response = self.save_async(step, state, **keywords)
        return response is not None and response.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = _STATE, **keywords: Any
    ) -> Any:
        """Begin to save ``state``; return Orbax's ``AsyncResponse``, None when nothing is due.

        As ``save_checkpointables_async``. ValueError: Orbax cannot save a leaf of ``state``.
        """
        name = checkpointable_name
        store = partial(self._storage.save_async, step, state, checkpointable_name=name)
        return self._save(step, {name: state}, store, **keywords)

    def save_checkpointables(
        self, step: int, checkpointables: dict[str, Any], **keywords: Any
    ) -> bool:
        """Save ``checkpointables`` where it is due, and wait; return whether it was."""
        response = self.save_checkpointables_async(step, checkpointables, **keywords)
        return response is not None and response.result()

    def save_checkpointables_async(
        self, step: int, checkpointables: dict[str, Any], **keywords: Any
    ) -> Any:
        """Begin to save; return Orbax's ``AsyncResponse[bool]``, None when no tier is due.

        When it returns, the state may be donated. With ``overwrite`` an earlier save of ``step`` is
        removed from storage, and from RAM once Orbax has accepted the call, which is collective and
        blocks. A call that Orbax refuses leaves RAM as it is.

        Raises:
          StepAlreadyExistsError, ValueError, TypeError: as Orbax's. PeerLeft: a process has died.
        """
        theirs: Any = checkpointables
        if isinstance(theirs, dict):
            theirs = {**theirs}  # Orbax adds the metrics to it
        store = partial(self._storage.save_checkpointables_async, step, theirs)
        return self._save(step, checkpointables, store, **keywords)

    def _save(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        store: Callable[..., Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> Any:
        """Save to storage by ``store``, which may refuse the call, and then to RAM."""
        number = _number(step)
        response = store(
            force=force, overwrite=overwrite, metrics=metrics, custom_metadata=custom_metadata
        )
        if overwrite:
            self._ram.forget(number)
            self._ram.survey()
        now_ns = time.time_ns()
        is_in_ram = self._ram.save(
            number,
            lambda: _items(checkpointables),
            metrics=metrics,
            custom_metadata=custom_metadata,
            force=force,
        )
        if not is_in_ram:
            return response
        self._times_ns = {number: now_ns}
        return response if response is not None else RamResponse(self._ram.outcome_of_newest())

    # Loading.

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = _STATE
    ) -> Any:
        """Load ``step``, or the newest, from RAM or else from storage. Collective; blocks.

        Raises:
          TypeError: Orbax can load no leaf like one of ``abstract_state``.
          StepNotFoundError: no tier has the step. Otherwise as ``load_checkpointables``.
        """
        # Orbax's method checks the leaves, and calls ``load_checkpointables`` of this class.
        mine, name = cast("Any", self), checkpointable_name
        return OrbaxsCheckpointer.load(mine, step, abstract_state, checkpointable_name=name)

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load the checkpointables of ``step``, or of the newest, by name. Collective; blocks.

        The newest step of RAM that cannot be loaded as asked for is left out, with a warning.

        Raises:
          StepNotFoundError: no tier has the step.
          ValueError: ``step`` is in RAM alone, and the abstract trees are not given, or not all, or
            by other names.
          StateMismatch, HostStateError, CheckpointError: ``step`` is in RAM alone, and cannot be
            restored into what is given, or not at all. Otherwise as Orbax's.
        """
        wanted: Any = None if step is None else _number(step)
        with self._ram.restoring():
            if self._ram.is_on:
                choice = self._ram.choose(wanted)
                restored = self._ram.restore(choice, _targets(abstract_checkpointables))
                if restored is not None:
                    return restored
                wanted = choice.stored if wanted is None else wanted
            given = cast("Any", abstract_checkpointables)
            loaded = self._storage.load_checkpointables(wanted, given)
            self._ram.go_on_from(wanted)
            return loaded

    def load_async(self, *args: Any, **keywords: Any) -> Any:
        """Raise NotImplementedError, as Orbax's does: what Orbax reads later would miss RAM."""
        raise NotImplementedError

    load_checkpointables_async = load_async

    # Contents.

    def metadata(self, step: Any = None) -> Any:
        """Return the metadata of a step, the newest without one. Not collective. As Orbax's.

        The metadata of a step in RAM alone has the leaves as ``jax.ShapeDtypeStruct``, in dicts by
        their paths, where this process holds a part of the step.
        """
        contents = self._contents_in_ram(step)
        if contents is None:
            return self._storage.metadata(step)
        newest, trees, kept = contents
        return self._of_ram(newest, trees.get(_STATE, trees), kept)

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """Return the metadata of a step's checkpointables, by name. As ``metadata``."""
        contents = self._contents_in_ram(step)
        if contents is None:
            return self._storage.checkpointables_metadata(step)
        return self._of_ram(*contents)

    def _contents_in_ram(self, step: Any) -> tuple[int, dict[str, Any], Mapping[str, Any]] | None:
        """Return number, trees and metadata of a step in RAM alone; None of any other."""
        try:
            return self._ram.contents_of(None if step is None else _number(step))
        except StepNotFound as error:
            text = f"step {self._ram.newest} is in RAM of others: {error}"
            raise errors.StepNotFoundError(text) from error

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Remove ``step`` from both tiers, or one checkpointable from storage. Collective; blocks.

        Return whether anything was removed. Raises as Orbax's, where no tier has the step.
        """
        delete = self._storage.delete
        was_stored, was_in_ram = self._delete(delete, step, checkpointable_name, missing_ok)
        return was_stored or was_in_ram

    def delete_async(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> Any:
        """Begin to remove ``step`` from storage, and remove it from RAM. Collective.

        The response tells whether storage had it.
        """
        delete = self._storage.delete_async
        response, _ = self._delete(delete, step, checkpointable_name, missing_ok)
        return response

    def _delete(
        self, delete: Callable[..., T], step: Any, name: str | None, missing_ok: bool
    ) -> tuple[T, bool]:
        """Delete from storage by ``delete``, which may refuse the call, and then from RAM.

        Return the answer of ``delete``, and whether RAM had the step.
        """
        number = _number(step)
        is_in_ram = name is None and self._ram.has(number)
        may_miss = is_in_ram if missing_ok is False else missing_ok
        answer = delete(step, checkpointable_name=name, missing_ok=may_miss)
        if is_in_ram:
            self._ram.forget(number)
        self._ram.survey()
        return answer, is_in_ram

    def cancel(self, step: Any = None) -> None:
        """Cancel storage's save in progress, and remove ``step`` from both tiers, if given.

        Collective with ``step``; blocks then.
        """
        number = None if step is None else _number(step)
        self._storage.cancel(step)
        if number is not None:
            self._ram.forget(number)
            self._ram.survey()

    def reload(self) -> None:
        """Read the directories again. Collective."""
        self._storage.reload()
        self._ram.survey()

    # Waiting and ending.

    def wait(self) -> None:
        """Wait for the saves and deletions in progress. Blocks; raises the errors of storage."""
        self._storage.wait()
        self._ram.wait()

    def close(self) -> None:
        """Wait, and release everything. All processes should call it."""
        self._close(after_error=False)

    def _close(self, *, after_error: bool) -> None:
        try:
            self._storage.close()
        finally:
            self._ram.stop(after_error=after_error)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._close(after_error=not is_good_end(error))

    save_pytree = _deprecated_name_of("save")
    save_pytree_async = _deprecated_name_of("save_async")
    load_pytree = _deprecated_name_of("load")
    load_pytree_async = _deprecated_name_of("load_async")
    pytree_metadata = _deprecated_name_of("metadata")


def _targets(abstract: Mapping[str, Any] | None) -> Items:
    """Return what to restore into."""
    if not abstract:
        items = Items(unfit="no abstract checkpointables are given")
    else:
        items = _items(abstract)
    if items.unfit:
        hint = "Give each tree as arrays or jax.ShapeDtypeStruct with shardings"
        return Items(unfit=f"{items.unfit}. {hint}")
    return items


def _items(checkpointables: Mapping[str, Any]) -> Items:
    """Return the checkpointables as the RAM tier keeps them."""
    given: dict[str, Given] = {}
    for name, value in checkpointables.items():
        if as_stateful(value) is not None:
            given[name] = Given("iterator", value, None)
        elif jax.tree.leaves(value):
            given[name] = Given("tree", value, None)
        else:
            return Items(unfit=f"{name!r} is no tree of arrays")
    return saved(given)


def _number(step: Any) -> int:
    """Return the number of a step, or of Orbax's ``CheckpointMetadata``. TypeError, as Orbax's."""
    return operator.index(step.step if isinstance(step, CheckpointMetadata) else step)
