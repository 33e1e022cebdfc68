"""``CheckpointManager`` with the contract of plain Orbax's (0.12.8), and a RAM tier in addition."""

# pyright: reportPrivateUsage=false
# ``_Restore`` is a part of the manager.

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from emergency_ckpt.checkpointer import EmergencyCheckpointer
from emergency_ckpt.core.save.save_rules import plain_metrics
from emergency_ckpt.core.step_names import METRICS, leaves_by_item
from emergency_ckpt.errors import DeadlineExceeded, StateMismatch
from emergency_ckpt.orbax import items as with_state
from emergency_ckpt.orbax import plain_items, saved_tree
from emergency_ckpt.orbax.manager import BothTiersManager
from emergency_ckpt.orbax.plain_options import (
    both_tiers,
    local_directory_of,
    step_names_of,
    without_saves,
)
from emergency_ckpt.restore.steps import StepDescription
from emergency_ckpt.storage.marker import OURS
from emergency_ckpt.storage.orbax_names import TREE
from emergency_ckpt.storage.steps.folders import ITEMS
from emergency_ckpt.types import LeafSpec, OrbaxStep

_MOMENT_S = 0.001


class _Checkpointer(EmergencyCheckpointer):
    """Storage has the steps that Orbax's options name, and at an end no other."""

    _stores_newest = False


class CheckpointManager(BothTiersManager):
    """Saves to ``directory`` as plain Orbax does, and also to the hosts' RAM.

    All processes must call the constructor, ``restore``, ``reload``, ``delete``, ``best_step``,
    ``all_steps(read=True)`` and ``close``, in the same order; and ``save`` at the same steps.

    A step has plain Orbax's format, with the items and names that it would have, and can be read by
    it; steps that plain Orbax wrote are restored. Differences from Orbax's manager (0.12.8):

    - JSON items and iterators are kept for each process, copied to other slices, and stored in
      ``<directory>/host_state``; of JSON, and of items of other handlers, the first process's are
      where Orbax has them too. Those must be small: they are part of the host state.
    - ``save`` and ``should_save`` return True also for a step that is saved to RAM alone.
    - Handlers' settings (OCDBT, file sizes) are not used for arrays. Unsupported options are a
      ValueError, those without effect a warning. Our ``CheckpointManagerOptions`` has further ones.
    - A restore of a part of the arrays reads all of them.

    Raises:
      ValueError: an option or an item's checkpointer is not supported, or Orbax refuses it.
      ConfigError, LocalTierError, RestoreFailed, DeadlineExceeded: as ``EmergencyCheckpointer``.
    """

    _checkpointer_class = _Checkpointer

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
        options = ocp.CheckpointManagerOptions() if options is None else options
        made = both_tiers(options, self.is_saving_in_progress)
        local = Path(os.path.abspath(local_directory_of(options)))
        local.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = os.fspath(directory)
        text = text if "://" in text else os.path.abspath(text)
        # It checks arguments, in its words, and reads and writes what is not a step's arrays.
        self._orbax = ocp.CheckpointManager(
            text,
            checkpointers,
            without_saves(options),
            metadata,
            item_names,
            item_handlers,
            handler_registry=handler_registry,
        )
        self._handlers = plain_items.Handlers(
            checkpointers, item_names, item_handlers, handler_registry
        )
        self._remembered: dict[str, Any] = {}
        self._read_only = options.read_only
        self._hides_metrics = options.prevent_write_metrics
        self._step_names = step_names_of(options)
        super().__init__(local, text, None, (), options=made, logger=logger)

    def __getattr__(self, name: str) -> Any:
        """Return the public part of Orbax's manager that this class has not."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._orbax, name)

    def save(  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax's own two differ
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save in the tiers where a save is due; return True if one was started. Not collective.

        Args:
          items, save_kwargs: older form: the state, or a dict of states by the name of their
            checkpointer.
          args: arguments of Orbax's for the only item, or ``Composite`` of several.
          metrics, custom_metadata: as in ``emergency_ckpt.orbax.CheckpointManager.save``.
          force: save in every tier that is on, independent of its policy.

        Raises:
          ValueError: an item is not supported. StepAlreadyExistsError (a ValueError): with
            ``force``, the step is there. Otherwise as that method.
        """
        self._orbax.save(step, items, save_kwargs, args=args)  # checks the arguments alone
        if self._read_only:
            return False
        if force and step in self.all_steps():
            raise StepAlreadyExistsError(f"step {step} already exists")
        named = self._named(items, save_kwargs, args, saves=True)
        self._handlers.check(named)
        given = plain_items.saved(named, self._handlers)
        rendered: list[tuple[dict[str, str], dict[str, bytes]]] = []

        def host_state() -> Any:
            rendered.append(self._handlers.files_of(given.handled))
            return plain_items.host_state_of(given, rendered[0][1], custom_metadata, metrics)

        def orbax_step() -> OrbaxStep:
            plain = None if self._hides_metrics else plain_metrics(metrics)
            return plain_items.orbax_step(given, *rendered[0], custom_metadata, plain)

        started = self._save_state(
            step, given.state, host_state, metrics, orbax_step, force=bool(force)
        )
        if started:
            trees = {name: saved_tree.remembered(tree) for name, tree in given.arrays.items()}
            self._remembered = trees
        return started

    def _named(self, items: Any, kwargs: Any, args: Any, *, saves: bool) -> dict[str, Any]:
        """Return the arguments of each item by its name."""
        if items is not None and args is not None:
            raise ValueError("give items or args, not both")
        if isinstance(args, ocp.args.Composite):
            return dict(args.items())
        if args is not None:
            return {plain_items.ONLY: args}
        if not self._handlers.is_named:
            items = {} if items is None else {plain_items.ONLY: items}
            kwargs = {} if kwargs is None else {plain_items.ONLY: kwargs}
        items, kwargs = items or {}, kwargs or {}
        return {
            name: self._handlers.args_of(name, items.get(name), kwargs.get(name), saves=saves)
            for name in dict.fromkeys((*items, *kwargs))
        }

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
        items a ``Composite``. Without a given one, or where its leaves do not say them, these are
        as they were saved. Iterators are repositioned in place.

        Another ``directory`` is read by Orbax.

        Raises:
          ValueError: the state that is given has other leaves; a cast or a transformation.
          Otherwise as ``emergency_ckpt.orbax.CheckpointManager.restore``.
        """
        if directory is not None and epath.Path(directory) != self.directory:
            return self._orbax.restore(step, items, restore_kwargs, directory, args)
        if items is not None or args is not None:
            self._orbax.save(0, items, args=args)  # checks the arguments alone
        named = self._named(items, restore_kwargs, args, saves=False)
        result = self._restore_given(step, named)
        if result is None:
            self._checkpointer.wait_until_finished()
            steps = self.all_steps(read=True)
            step = max(steps, default=None) if step is None else step
            if step not in steps:
                raise FileNotFoundError(f"there is no step {step} in {self.directory} or in RAM")
            result = _Restore(self, step, self._describe(step)).restore(named)
        if args is None and self._handlers.is_named is False and set(result) == {plain_items.ONLY}:
            return result[plain_items.ONLY]
        if args is not None and not isinstance(args, ocp.args.Composite):
            return result[plain_items.ONLY]
        return ocp.args.Composite(**result)

    def _restore_given(self, step: int | None, named: Mapping[str, Any]) -> dict[str, Any] | None:
        """Restore items of arrays into trees that say all; None where the saved ones are needed."""
        trees: dict[str, Any] = {}
        for name, value in named.items():
            item = getattr(value, "item", value)
            restore_args = getattr(value, "restore_args", None)
            if not self._handlers.is_of_arrays(name, value) or getattr(
                value, "partial_restore", False
            ):
                return None
            with_state.check_transforms(value)
            if not saved_tree.is_complete(item):
                return None
            trees[name] = saved_tree.placed_tree(item, restore_args)
        if not trees:
            return None
        alone = len(trees) == 1
        try:
            _, state = self._restore_into(
                step, next(iter(trees.values())) if alone else trees, None
            )
        except StateMismatch:
            if set(named) == set(self._remembered):
                raise
            return None  # there may be further items
        return dict.fromkeys(trees, state) if alone else dict(state)

    def item_metadata(self, step: int) -> Any:
        """Return shapes and dtypes of ``step``, as Orbax's ``ArrayMetadata``.

        Of one unnamed item as its tree, else ``Composite``. Of a step that only RAM has: by path.
        """
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Return Orbax's ``StepMetadata`` of ``step``, or the manager's ``RootMetadata``."""
        if step is None or not self._is_stored(step):
            if step is None:
                return self._orbax.metadata()
            found = super().metadata(step)
            return dataclasses.replace(found, item_metadata=found.item_metadata.state)
        found = self._orbax.metadata(step)
        custom = {k: v for k, v in (found.custom_metadata or {}).items() if k != OURS}
        described = self._described(step, found.item_metadata)
        return dataclasses.replace(found, custom_metadata=custom, item_metadata=described)

    def _described(self, step: int, items: Any) -> Any:
        """Return Orbax's metadata of items, also of arrays of which it knows no handler."""
        folder, handler = self._folder_of(step), ocp.PyTreeCheckpointHandler()
        assert folder is not None

        def described(name: str, found: Any) -> Any:
            is_known = found is not None or not (folder / name / TREE).exists()
            return found if is_known else handler.metadata(folder / name)

        if items is None:
            return described(plain_items.ONLY, None)
        if not plain_items.is_by_name(items):
            return items
        return ocp.args.Composite(**{n: described(n, found) for n, found in items.items()})

    def metrics(self, step: int) -> Any:
        """Return the metrics given with ``step``, or None."""
        if self._is_stored(step):
            return self._orbax.metrics(step)
        return super().metrics(step)

    def all_steps(self, read: bool | None = None) -> list[int]:
        """As ``emergency_ckpt.orbax.CheckpointManager``, but after the save in progress."""
        if not read:
            self._checkpointer.wait_until_finished()
        return super().all_steps(read)

    def _is_stored(self, step: int) -> bool:
        return self._folder_of(step) is not None

    def _folder_of(self, step: int) -> epath.Path | None:
        """Return the folder of a step in storage; None when it is in RAM alone. Blocks."""
        try:
            return epath.Path(self._step_names.find_step(self.directory, step).path)
        except (ValueError, FileNotFoundError):
            return None

    def reload(self) -> None:
        """As ``emergency_ckpt.orbax.CheckpointManager.reload``."""
        super().reload()
        self._orbax.reload()

    def delete(self, step: int) -> None:
        """As ``emergency_ckpt.orbax.CheckpointManager.delete``; with ``read_only`` nothing."""
        if self._read_only:
            self._orbax.delete(step)
            return
        super().delete(step)

    def is_saving_in_progress(self) -> bool:
        """Return whether this process has a save in progress. Not collective."""
        try:
            self._checkpointer.wait_until_finished(_MOMENT_S)
        except DeadlineExceeded:
            return True
        return False

    def _close(self, *, after_error: bool) -> None:
        is_first = not self._closed
        try:
            super()._close(after_error=after_error)
        finally:
            if is_first:
                self._orbax.close()


class _Restore:
    """A restore of one step for which the caller does not say all: what was saved completes it."""

    def __init__(self, manager: CheckpointManager, step: int, found: StepDescription) -> None:
        self._manager = manager
        self._step = step
        self._found = found
        self._in_host_state = plain_items.HostStateItems(found.host_state)
        self._folder = manager._folder_of(step)
        self._arrays = self._array_items()

    def restore(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the restored items by name. ``named``: their arguments; none for all items."""
        asked = dict(named)
        if not asked:
            asked = dict.fromkeys((*self._arrays, *self._others()))
        wanted: dict[str, saved_tree.Wanted] = {}
        for name in asked.keys() & self._arrays.keys():
            value = asked[name]
            with_state.check_transforms(value)
            wanted[name] = saved_tree.Wanted(
                self._arrays[name],
                getattr(value, "item", None),
                getattr(value, "restore_args", None),
                is_partial=bool(getattr(value, "partial_restore", False)),
            )
        values = {
            name: getattr(asked[name], "item", asked[name])
            for name in asked
            if name in self._in_host_state.values and name not in wanted
        }
        target = plain_items.target_for(values) if values else None
        state = {n: wanted[n].target if n in wanted else tree for n, tree in self._arrays.items()}
        state = plain_items.state_of(state)
        _, restored = self._manager._restore_into(self._step, state, target)
        trees = dict.fromkeys(self._arrays, restored) if len(self._arrays) == 1 else restored
        result = {name: each.part_of(trees[name]) for name, each in wanted.items()}
        if target is not None:
            result |= plain_items.values_in(target, list(values), self._step)
        rest = {name: value for name, value in asked.items() if name not in result}
        return {**result, **self._by_orbax(rest)} if rest else result

    def _by_orbax(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return items that Orbax's handlers have written."""
        manager = self._manager
        composite: Any = ocp.args.Composite(**args)
        if self._in_host_state.names.isdisjoint(args):
            if None in args.values():
                handlers: Any = manager._orbax.metadata(self._step).item_handlers
                composite = plain_items.restore_args(args, handlers)
            return dict(manager._orbax.restore(self._step, args=composite).items())
        with tempfile.TemporaryDirectory(prefix="eckpt-items-") as temporary:
            folder = Path(temporary) / manager._step_names.build_name(self._step)
            folder.mkdir()
            self._in_host_state.write(list(args), folder)
            if None in args.values():  # each by the handler that wrote it
                composite = None
            found = manager._orbax.restore(self._step, directory=temporary, args=composite)
            return (
                dict(found.items()) if plain_items.is_by_name(found) else {plain_items.ONLY: found}
            )

    def _others(self) -> list[str]:
        """Return the names of the items without arrays."""
        if self._in_host_state.array_items is not None or self._folder is None:
            return sorted(self._in_host_state.names - self._arrays.keys())
        items = self._manager._orbax.item_metadata(self._step)
        names = {*self._arrays, METRICS}
        return sorted(set(items) - names) if plain_items.is_by_name(items) else []

    def _array_items(self) -> dict[str, Any]:
        """Return the trees of the items with arrays by name."""
        leaves = {leaf.path: leaf for leaf in self._found.leaves}
        names = self._in_host_state.array_items
        if names is None:
            names = self._names_in_storage()
        by_item = leaves_by_item(names, leaves)
        return {name: self._tree_of(name, found) for name, found in by_item.items()}

    def _names_in_storage(self) -> list[str]:
        if self._folder is None:
            return [plain_items.ONLY]
        names = [path.name for path in self._folder.iterdir() if (path / TREE).exists()]
        usual = [name for name in ITEMS if name in names]
        return usual[:1] or sorted(names) or [plain_items.ONLY]

    def _tree_of(self, name: str, leaves: Mapping[str, LeafSpec]) -> Any:
        """Return the tree of an item: as this manager saved it, or a step in storage has it."""
        remembered = self._manager._remembered.get(name)
        if remembered is not None and saved_tree.paths_of(remembered) == set(leaves):
            return remembered
        steps = [self._step, *reversed(self._manager.all_steps())]
        for step in steps:
            folder = self._manager._folder_of(step)
            if folder is None or not (folder / name / TREE).exists():
                continue
            tree = saved_tree.stored_tree(folder / name, leaves)
            if saved_tree.paths_of(tree) == set(leaves):
                return tree
        return saved_tree.nested(leaves)
