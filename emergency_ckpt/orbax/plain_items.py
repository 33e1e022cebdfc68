"""Items of plain Orbax's manager, divided into tensors and host state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import orbax.checkpoint as ocp

from emergency_ckpt.errors import HostStateError
from emergency_ckpt.orbax import items as with_state
from emergency_ckpt.state.host_state_codec import as_stateful

ONLY = "default"
"""Orbax's name of an unnamed item."""

_TENSORS_SAVE = (ocp.args.PyTreeSave, ocp.args.StandardSave)
_TENSORS_RESTORE = (ocp.args.PyTreeRestore, ocp.args.StandardRestore)
_OTHERS = "items"


class Items(NamedTuple):
    """The items of one call.

    Attributes:
      tensors: trees by the item's name.
      others: iterators, and the values of JSON items.
      is_single: one item was given, without a name.
    """

    tensors: dict[str, Any]
    others: dict[str, Any]
    is_single: bool

    @property
    def state(self) -> Any:
        """Return the tensors to save: the tree of the only item with tensors, or a dict of several.

        So a step of one item has the format of plain Orbax.
        """
        return next(iter(self.tensors.values())) if len(self.tensors) == 1 else dict(self.tensors)

    def result(self, state: Any, host_state: Mapping[str, Any] | None) -> Any:
        """Return the result of ``restore``."""
        found = {next(iter(self.tensors)): state} if len(self.tensors) == 1 else dict(state)
        if self.others and host_state is not None:
            found.update({name: host_state[_OTHERS][name] for name in self.others})
        return found[ONLY] if self.is_single else ocp.args.Composite(**found)


def saved(items: object, args: object, checkpointers: object) -> Items:
    """Return the items given to ``save``, through ``args`` or the older parameters.

    Raises:
      ValueError: neither or both are given, an item is not supported, or none has tensors.
    """
    named, is_single = _named(items, args, checkpointers)
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, _TENSORS_SAVE):
            with_state.check_casts(value)
            tensors[name] = cast("Any", value).item
            continue
        item = getattr(value, "item", value)
        if not isinstance(value, ocp.args.JsonSave) and as_stateful(item) is None:
            raise ValueError(f"item {name!r} of {type(value).__name__} cannot be kept: {_KEPT}")
        others[name] = item
    if not tensors:
        raise ValueError(f"there are no arrays to save: {_KEPT}")
    return Items(tensors, others, is_single)


def wanted(items: object, args: object, restore_kwargs: object, checkpointers: object) -> Items:
    """Return the items requested from ``restore``: trees to restore into, and values to apply.

    Raises:
      ValueError: as ``saved``; or a tree is not given, so its shardings are unknown.
    """
    named, is_single = _named(items, args, checkpointers, restore_kwargs)
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in named.items():
        item = getattr(value, "item", value)
        if value is not None and not isinstance(value, (*_TENSORS_RESTORE, *_TENSORS_SAVE)):
            if not isinstance(value, ocp.args.JsonRestore) and as_stateful(item) is None:
                raise ValueError(f"item {name!r} of {type(value).__name__} is not kept: {_KEPT}")
            others[name] = item
            continue
        if item is None:
            raise ValueError(
                f"item {name!r}: give the state to restore into, such as"
                " args.StandardRestore(state): its shapes, dtypes and shardings are needed"
            )
        with_state.check_transforms(value)
        tensors[name] = _on_shardings(item, getattr(value, "restore_args", None))
    if not tensors:
        raise ValueError("there is no state to restore into among the items")
    return Items(tensors, others, is_single)


_KEPT = "PyTreeSave, StandardSave, JsonSave, and iterators with get_state and set_state are kept"


def host_state_of(
    items: Items, custom_metadata: Mapping[str, Any] | None, metrics: Any
) -> dict[str, Any]:
    """Return the host state of this process: the items without tensors."""
    return {_OTHERS: dict(items.others), **with_state.metadata_of(custom_metadata, metrics)}


def target_for(items: Items) -> dict[str, Any] | None:
    """Return the target of the host state; None when only tensors are requested."""
    return (
        {_OTHERS: dict(items.others), **with_state.metadata_of(None, None)}
        if items.others
        else None
    )


def check_restored(items: Items, host_state: Mapping[str, Any], step: int) -> None:
    """Raise HostStateError when a requested item was not saved with ``step``."""
    missing = sorted(set(items.others) - set(host_state[_OTHERS]))
    if missing:
        raise HostStateError(
            "restore",
            f"items {missing} of step {step}",
            "none were saved",
            hint="do not ask for them",
        )


def _named(
    items: object, args: object, checkpointers: object, restore_kwargs: object = None
) -> tuple[dict[str, Any], bool]:
    """Return the arguments by item, and True when the only one has no name."""
    if items is not None and args is not None:
        raise ValueError("give items or args, not both")
    if args is not None:
        if isinstance(args, ocp.args.Composite):
            return dict(cast("Mapping[str, Any]", args).items()), False
        return {ONLY: args}, True
    if isinstance(checkpointers, Mapping):
        kinds = cast("Mapping[str, Any]", checkpointers)
        given = dict(cast("Mapping[str, Any]", items or {}))
        more = cast("Mapping[str, Any]", restore_kwargs or {})
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise ValueError(f"items {unknown} have no checkpointer")
        return {n: _as_args(item, kinds[n], more.get(n)) for n, item in given.items()}, False
    if items is None:
        raise ValueError("give the state, as items or in args")
    return {ONLY: _as_args(items, checkpointers, restore_kwargs)}, True


def _as_args(item: Any, checkpointer: object, restore_kwargs: object) -> Any:
    """Return the arguments that a checkpointer of this kind makes of an item."""
    handler = getattr(checkpointer, "handler", checkpointer)
    if isinstance(handler, ocp.JsonCheckpointHandler):
        return ocp.args.JsonSave(item) if restore_kwargs is None else ocp.args.JsonRestore(item)
    if as_stateful(item) is not None:
        return item
    restore_args = cast("Mapping[str, Any]", restore_kwargs or {}).get("restore_args")
    return ocp.args.PyTreeRestore(item, restore_args) if restore_args else ocp.args.PyTreeSave(item)


def _on_shardings(item: Any, restore_args: Any) -> Any:
    """Return ``item`` with the shardings of ``restore_args``."""
    if restore_args is None:
        return item

    def place(leaf: Any, args: Any) -> Any:
        sharding, dtype = getattr(args, "sharding", None), getattr(args, "dtype", None)
        if dtype is not None and hasattr(leaf, "dtype") and dtype != leaf.dtype:
            raise ValueError("restore_args with another dtype are not supported: cast the result")
        if not isinstance(sharding, jax.sharding.Sharding) or not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, item, restore_args)
