"""Items of plain Orbax's manager: arrays, host state, and what Orbax's handlers write."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_args import get_registered_args_cls

from emergency_ckpt.core.save.save_rules import plain_metrics
from emergency_ckpt.errors import HostStateError
from emergency_ckpt.orbax import items as with_state
from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.storage.orbax_names import COMMITTED, STEP_METADATA
from emergency_ckpt.types import OrbaxStep

ONLY = "default"
"""Orbax's name of an unnamed item."""

_ARRAYS = (
    *(ocp.args.PyTreeSave, ocp.args.StandardSave),
    *(ocp.args.PyTreeRestore, ocp.args.StandardRestore),
)
_OF_TREES = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler)
_JSON = (ocp.args.JsonSave, ocp.args.JsonRestore)
_ITEMS, _ARRAY_ITEMS, _FILES = "items", "array_items", "files"


class Handlers:
    """The items' handlers that the manager was given, by name or in a registry of Orbax's.

    Raises:
      ValueError: of Orbax's manager, for what it does not take together.
    """

    def __init__(
        self, checkpointers: Any, item_names: Any, item_handlers: Any, registry: Any
    ) -> None:
        given: Any = item_handlers if checkpointers is None else checkpointers
        self.is_named = isinstance(given, Mapping) or (given is None and item_names is not None)
        if given is not None and not isinstance(given, Mapping):
            given = {ONLY: given}
        found = {} if given is None else cast("Mapping[str, Any]", given)
        self.names = set(found) | set(item_names or ())
        self._by_name = {name: getattr(each, "handler", each) for name, each in found.items()}
        self._registry = registry

    def is_of_arrays(self, name: str, args: Any) -> bool:
        """Return whether an item is a tree of arrays that is saved as such.

        Another handler than Orbax's own for trees writes a format of its own.
        """
        handler = self._by_name.get(name)
        for key in (name, None):
            if self._registry is not None and handler is None and self._registry.has(key, args):
                handler = self._registry.get(key, args)
        return is_of_arrays(args) and (handler is None or isinstance(handler, _OF_TREES))

    def check(self, args: Mapping[str, Any]) -> None:
        """Raise ValueError for an item that has no handler, or one of another kind."""
        for name, value in args.items():
            handler = self._by_name.get(name)
            kinds = () if handler is None else get_registered_args_cls(handler)
            if (self.names and name not in self.names) or (kinds and not isinstance(value, kinds)):
                raise ValueError(
                    f'Item "{name}" with {type(value).__name__} does not match with any registered'
                    " handler"
                )

    def args_of(self, name: str, item: Any, more: Any, *, saves: bool) -> Any:
        """Return the arguments that an item's handler takes, of the older parameters."""
        if as_stateful(item) is not None:
            return item
        handler = self._by_name.get(name)
        if handler is None and self.names:
            raise ValueError(f'Unknown key "{name}": it has no checkpointer')
        kinds = (
            (ocp.args.PyTreeSave, ocp.args.PyTreeRestore)
            if handler is None
            else get_registered_args_cls(handler)
        )
        build: Any = kinds[0] if saves else kinds[1]
        return build(item, **dict(more or {}))

    def files_of(self, args: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, bytes]]:
        """Return the name of each item's handler, and the files that the handlers write.

        Not collective: this process writes them, in a temporary folder. Errors of Orbax pass.
        """
        if not args:
            return {}, {}
        alone = ocp.options.MultiprocessingOptions(
            primary_host=ocp.multihost.process_index(),
            active_processes={ocp.multihost.process_index()},
            barrier_sync_key_prefix=f"eckpt_{ocp.multihost.process_index()}",
        )
        handlers = {name: self._by_name.get(name) for name in args}
        handlers = handlers if self._registry is None else {}
        composite = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
            handler_registry=self._registry,
            **cast("Any", handlers),
        )
        with tempfile.TemporaryDirectory(prefix="eckpt-items-") as temporary:
            step = Path(temporary) / "step"
            with ocp.Checkpointer(composite, multiprocessing_options=alone) as checkpointer:
                checkpointer.save(epath.Path(step), args=ocp.args.Composite(**args))
            written = [path for path in step.rglob("*") if path.is_file()]
            files = {str(path.relative_to(step)): path.read_bytes() for path in written}
        files = {name: data for name, data in files.items() if not name.endswith(COMMITTED)}
        return dict(json.loads(files[STEP_METADATA])["item_handlers"]), files


class Saved(NamedTuple):
    """The items given to ``save``.

    Attributes:
      arrays: trees by the item's name.
      values: iterators, and the values of JSON items, which the host state has.
      standard: names of those with arrays that StandardSave was given for.
      handled: arguments of the items that Orbax's handlers write: those of JSON, and all others.
    """

    arrays: dict[str, Any]
    values: dict[str, Any]
    handled: dict[str, Any]
    standard: list[str]

    @property
    def state(self) -> Any:
        """The tensors to save: the tree of the only item with arrays, or a dict of several."""
        return state_of(self.arrays)


def state_of(arrays: Mapping[str, Any]) -> Any:
    """Return the state that is saved for items with arrays: of the only one its tree, else a dict.

    Without any it has one array of no elements, which Orbax does not store.
    """
    if not arrays:
        return {"no arrays": np.zeros(0, np.uint8)}
    return next(iter(arrays.values())) if len(arrays) == 1 else dict(arrays)


def saved(args: Mapping[str, Any], handlers: Handlers) -> Saved:
    """Return the items of ``save``, by their arguments. ValueError for an unsupported one."""
    found = Saved({}, {}, {}, [])
    for name, value in args.items():
        item = getattr(value, "item", value)
        if handlers.is_of_arrays(name, value):
            with_state.check_casts(value)
            found.arrays[name] = item
            if isinstance(value, ocp.args.StandardSave):
                found.standard.append(name)
        elif as_stateful(item) is not None:
            found.values[name] = item
        elif isinstance(value, ocp.args.CheckpointArgs):
            found.handled[name] = value
            if isinstance(value, _JSON):
                found.values[name] = item
        else:
            raise ValueError(
                f"item {name!r} of {type(value).__name__} cannot be kept: give arguments of"
                " Orbax's, or an iterator with get_state and set_state"
            )
    return found


def host_state_of(
    items: Saved,
    files: Mapping[str, bytes],
    custom_metadata: Mapping[str, Any] | None,
    metrics: Any,
) -> dict[str, Any]:
    """Return the host state of this process: the items without arrays, and the others' names."""
    return {
        _ITEMS: dict(items.values),
        _ARRAY_ITEMS: list(items.arrays),
        _FILES: dict(files),
        **with_state.metadata_of(custom_metadata, metrics),
    }


class HostStateItems:
    """The items in the host state of a saved step; none where plain Orbax wrote it."""

    def __init__(self, host_state: Any) -> None:
        found = cast("dict[str, Any]", host_state) if isinstance(host_state, dict) else {}
        self.values: dict[str, Any] = found.get(_ITEMS) or {}
        self.array_items: list[str] | None = found.get(_ARRAY_ITEMS)
        self._files: dict[str, bytes] = found.get(_FILES) or {}
        self.names = {*self.values, *(self.array_items or ()), *self._handled()}

    def _handled(self) -> set[str]:
        return {name.partition("/")[0] for name in self._files if name != STEP_METADATA}

    def write(self, names: Sequence[str], folder: Path) -> None:
        """Write the files of items below ``folder``, as Orbax's handlers have written them."""
        for name, data in self._files.items():
            if ".." in Path(name).parts:
                raise HostStateError("restore", f"file {name!r}", "it is not below the step")
            if name.partition("/")[0] in (*names, STEP_METADATA):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def target_for(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the host state to restore in place, for some of its items."""
    return {
        _ITEMS: dict(values),
        _ARRAY_ITEMS: [],
        _FILES: {},
        **with_state.metadata_of(None, None),
    }


def values_in(target: Mapping[str, Any], names: Sequence[str], step: int) -> dict[str, Any]:
    """Return the restored values. HostStateError when one was not saved with ``step``."""
    found = cast("Mapping[str, Any]", target[_ITEMS])
    missing = sorted(set(names) - set(found))
    if missing:
        raise HostStateError(
            "restore", f"items {missing} of step {step}", "none were saved", hint="do not ask"
        )
    return {name: found[name] for name in names}


def is_of_arrays(args: Any) -> bool:
    """Return whether the arguments are those of an item with arrays."""
    return isinstance(args, _ARRAYS)


def restore_args(args: Mapping[str, Any], handlers: Mapping[str, str]) -> ocp.args.Composite:
    """Return ``args``, for None those of the handler of Orbax's that wrote the item.

    ``handlers``: their names, as Orbax's metadata has them; of others None stays.
    """
    kinds = [k for k in vars(ocp).values() if isinstance(k, type)]
    known: dict[str, Any] = {
        kind.typestr(): kind for kind in kinds if issubclass(kind, ocp.CheckpointHandler)
    }

    def args_of(name: str) -> Any:
        kind = known.get(handlers.get(name, ""))
        return None if kind is None else get_registered_args_cls(kind)[1]()

    return ocp.args.Composite(**{name: args[name] or args_of(name) for name in args})


def is_by_name(found: Any) -> bool:
    """Return whether an answer of Orbax is of items by name: of a base of ``args.Composite``."""
    return isinstance(found, Mapping) and issubclass(ocp.args.Composite, type(found))  # pyright: ignore[reportUnknownArgumentType]


def orbax_step(
    items: Saved,
    handlers: Mapping[str, str],
    files: Mapping[str, bytes],
    custom_metadata: Mapping[str, Any] | None,
    metrics: Any,
) -> OrbaxStep:
    """Return what Orbax's readers find of a step besides its arrays."""
    return OrbaxStep(
        items=tuple(items.arrays),
        handlers={
            **dict.fromkeys(items.standard, ocp.StandardCheckpointHandler.typestr()),
            **handlers,
        },
        documents={name: data for name, data in files.items() if name != STEP_METADATA},
        metrics=metrics,
        custom_metadata=plain_metrics(custom_metadata or {}, "custom_metadata"),
    )
