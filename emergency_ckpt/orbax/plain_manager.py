"""``CheckpointManager`` of plain Orbax (0.12.8), with a RAM tier beside it.

Storage is Orbax's own, so plain Orbax goes on from the same directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from emergency_ckpt.cluster.preemption import is_good_end, is_success
from emergency_ckpt.core.step_names import leaves_by_item
from emergency_ckpt.errors import StepNotFound
from emergency_ckpt.orbax import plain_items, saved_tree
from emergency_ckpt.orbax.ram_beside import Items, Kept, RamBeside


@dataclasses.dataclass
class CheckpointManagerOptions(ocp.CheckpointManagerOptions):
    """Orbax's options, followed by those of the RAM tier, which have defaults.

    Attributes:
      local_directory: on this host's ramdisk; None: the environment's ECKPT_LOCAL_DIR, else
        ``/dev/shm/eckpt-<user id>``. The directory is created if it does not exist.
      settings: further settings of ``emergency_ckpt.config.Config``, by name, without ``dir``.
    """

    local_directory: str | os.PathLike[str] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class CheckpointManager:
    """Orbax's ``CheckpointManager``, and a RAM tier beside it.

    All processes must call the constructor, ``restore``, ``delete``, ``reload`` and ``close``, in
    the same order, and ``save`` at the same steps; from one thread.

    Every method that this class does not define is Orbax's own: ``all_steps``, ``should_save``,
    ``best_step``, ``metrics`` and the like know storage alone. This class is no subclass of
    Orbax's, because Orbax's own methods must not see RAM's steps: ``isinstance`` is False.

    ``is_saving_in_progress`` is Orbax's too, and says nothing of a save to RAM. Orbax gives one
    answer on all processes, so that a loop may call ``save`` by it. Saves to RAM end at another
    moment on each process. Where RAM is saved at each step, the loop would seldom save to storage.
    ``wait_until_finished`` waits for both tiers.

    The RAM tier is on in jobs of several processes, and where ``local_directory`` or ``settings``
    of our ``CheckpointManagerOptions`` are given; never with ``read_only``. A save to RAM takes
    trees of arrays and numbers that are saved by Orbax's handlers, JSON, and objects with
    ``get_state`` and ``set_state``; a step with another item is saved to storage alone, with one
    warning. An error of the RAM tier is a warning and the event ``ram.off``; from then on this
    class is Orbax's alone. docs/migrating_orbax.md lists the differences from Orbax's class.

    Raises:
      ConfigError: a setting is wrong. Otherwise as Orbax's.
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
        given = ocp.CheckpointManagerOptions() if options is None else options
        self._orbax = ocp.CheckpointManager(
            directory,
            checkpointers,
            options,
            metadata,
            item_names,
            item_handlers,
            logger,
            handler_registry,
        )
        self._handlers = plain_items.Handlers(
            checkpointers, item_names, item_handlers, handler_registry
        )
        self._step_names = given.step_name_format or ocp.path.step.standard_name_format(
            step_prefix=given.step_prefix,
            step_format_fixed_length=given.step_format_fixed_length,
        )
        self._ram = RamBeside(
            self._orbax.directory,
            self._orbax.all_steps,
            local_directory=getattr(given, "local_directory", None),
            settings=getattr(given, "settings", None),
            async_save=given.enable_async_checkpointing,
            logger=logger,
            is_off=given.read_only or _is_for_some(given),
        )

    def __getattr__(self, name: str) -> Any:
        """Return the public part of Orbax's manager that this class has not."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._orbax, name)

    # Steps.

    def latest_step(self) -> int | None:
        """Return the newest step, also one that is in RAM alone. Not collective; no IO.

        As of the constructor, ``reload``, ``restore`` and ``wait_until_finished``.
        """
        newest = self._ram.newest
        return self._orbax.latest_step() if newest is None else newest

    def reload(self) -> None:
        """Read the directories again. Collective."""
        self._orbax.reload()
        self._ram.survey()

    def delete(self, step: int) -> None:
        """Remove ``step`` from both tiers. Collective; blocks.

        FileNotFoundError: no tier has the step.
        """
        was_in_ram = self._ram.forget(step)
        if not was_in_ram or step in self._orbax.all_steps():
            self._orbax.delete(step)
        self._ram.survey()

    # Saving and restoring.

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save where a save is due; return True if one was begun, in RAM or in storage.

        When it returns, the state may be donated; without ``enable_async_checkpointing`` the saves
        have ended. PeerLeft: a process has died.
        """
        is_stored = self._orbax.save(
            step, items, save_kwargs, metrics, force, args, custom_metadata
        )
        is_in_ram = self._ram.save(
            step,
            lambda: plain_items.saved(self._handlers.given(items, save_kwargs, args)),
            metrics=metrics,
            custom_metadata=custom_metadata,
            force=bool(force),
        )
        return is_in_ram or is_stored

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: Any = None,
    ) -> Any:
        """Restore ``step``, or the newest, from RAM or else from storage. Collective; blocks.

        A step comes from RAM where RAM has the whole step, no older than storage's newest. What the
        caller's trees leave out is as in storage's newest step. The newest step of RAM that cannot
        be restored as asked for is left out, with a warning. Orbax reads another ``directory``.

        Raises:
          ValueError, CheckpointError: ``step`` is in RAM alone, and cannot be restored into what is
            given, or not at all. Otherwise as Orbax's.
        """
        is_elsewhere = directory is not None and epath.Path(directory) != self._orbax.directory
        if is_elsewhere or not self._ram.is_on:
            return self._orbax.restore(step, items, restore_kwargs, directory, args)
        with self._ram.restoring():
            choice = self._ram.choose(step)
            if choice.kept is not None:
                given = self._handlers.given(items, restore_kwargs, args)
                target, parts = self._target(given, choice.kept)
                restored = self._ram.restore(choice, target)
                if restored is not None:
                    values = {name: part_of(restored[name]) for name, part_of in parts.items()}
                    is_alone = set(values) == {plain_items.ONLY}
                    return values[plain_items.ONLY] if is_alone else ocp.args.Composite(**values)
            step = choice.stored if step is None else step
            loaded = self._orbax.restore(step, items, restore_kwargs, directory, args)
            self._ram.go_on_from(step)
            return loaded

    def _target(self, given: Mapping[str, plain_items.Given], kept: Kept) -> plain_items.RamTarget:
        """Return what to restore RAM's step into, or why that cannot be. Collective."""
        template: dict[str, Any] = {}
        try:
            if plain_items.needs_template(given, kept):
                template = self._template(kept)
            return plain_items.target(given, kept, template)
        except ValueError as error:
            return Items(unfit=str(error)), {}

    def _template(self, kept: Kept) -> dict[str, Any]:
        """Return the trees of storage's newest step as they were saved. Collective; ValueError."""
        trees: dict[str, Any] = {}
        problem, newest = "", self._orbax.latest_step()
        try:
            if newest is not None:
                folder = epath.Path(self._step_names.find_step(self._orbax.directory, newest).path)
                keys = leaves_by_item(kept.trees, kept.keys)
                for name in kept.trees:
                    if (folder / name).exists():
                        trees[name] = saved_tree.stored_tree(folder / name, keys.get(name, {}))
        except Exception as error:  # noqa: BLE001 - the others must learn of it
            problem = f"step {newest} cannot be read: {error}"
        if problem := self._ram.agreed(problem):
            raise ValueError(problem)
        return trees

    # Contents of a step.

    def item_metadata(self, step: int) -> Any:
        """Return shapes and dtypes of ``step``. As ``metadata``."""
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Return the metadata of a step, or of the run. As Orbax's.

        The metadata of a step in RAM alone has the items as storage's newest step has them. Its
        metrics and custom metadata are those of ``save``; where this process holds no part of the
        step, they are empty.
        """
        stored = self._orbax.latest_step()
        if step is None or step != self._ram.newest or stored is None:
            return self._orbax.metadata(step)
        kept: Mapping[str, Any] = {}
        with contextlib.suppress(StepNotFound):
            contents = self._ram.contents_of(step)
            kept = {} if contents is None else contents[2]
        return dataclasses.replace(
            self._orbax.metadata(stored),
            metrics=kept.get("metrics") or {},
            custom_metadata=kept.get("custom_metadata") or {},
        )

    # Waiting and ending.

    def wait_until_finished(self) -> None:
        """Wait for the saves in progress. Blocks; raises the errors of storage."""
        self._orbax.wait_until_finished()
        self._ram.wait()

    def close(self) -> None:
        """Wait, and release everything. All processes should call it."""
        self._close(after_error=False)

    def _close(self, *, after_error: bool) -> None:
        try:
            self._orbax.close()
        finally:
            self._ram.stop(after_error=after_error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        try:
            self._close(after_error=not is_good_end(error))
        except Exception as failure:
            if is_success(error):
                raise
            logging.error("closing the manager failed: %s", failure)  # the block's matters more


def _is_for_some(options: ocp.CheckpointManagerOptions) -> bool:
    """Return whether the manager is one of some processes only; warn that RAM is off then."""
    if options.multiprocessing_options.active_processes is None:
        return False
    logging.warning(
        "nothing is saved to RAM: active_processes of multiprocessing_options is set, and a save to"
        " RAM needs all processes"
    )
    return True
