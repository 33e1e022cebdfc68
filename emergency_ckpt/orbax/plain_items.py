"""Items of plain Orbax's manager, as arguments of its methods, and as the RAM tier keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import jax
import orbax.checkpoint as ocp

from emergency_ckpt.errors import InvalidState
from emergency_ckpt.orbax import saved_tree
from emergency_ckpt.orbax.items import check_transforms
from emergency_ckpt.orbax.ram_beside import Items, Kept
from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.state.tree import PyTree, describe

ONLY = "default"
"""Orbax's name of an unnamed item."""

_OF_TREES = (
    ocp.args.PyTreeSave,
    ocp.args.StandardSave,
    ocp.args.PyTreeRestore,
    ocp.args.StandardRestore,
)
_OF_JSON = (ocp.args.JsonSave, ocp.args.JsonRestore)
_TREE_HANDLERS = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler)


RamTarget = tuple[Items, Mapping[str, Callable[[Any], Any]]]
"""The target of a restore from RAM, and by name what the caller gets of a restored item."""


class Given(NamedTuple):
    """One item, as a call of the manager gives it.

    Attributes:
      kind: empty for an item that the RAM tier cannot keep.
      item: its value, or what to restore into.
      args: further arguments, as attributes.
    """

    kind: Literal["tree", "iterator", "value", ""]
    item: Any
    args: Any


class Handlers:
    """The items' handlers that the manager was given, by name or in a registry of Orbax's.

    An item of another handler than Orbax's own is in a format of that handler: storage's alone.
    """

    def __init__(
        self, checkpointers: Any, item_names: Any, item_handlers: Any, registry: Any
    ) -> None:
        handlers: Any = item_handlers if checkpointers is None else checkpointers
        self._is_named = isinstance(handlers, Mapping) or (
            handlers is None and item_names is not None
        )
        if handlers is not None and not isinstance(handlers, Mapping):
            handlers = {ONLY: handlers}
        by_name = {} if handlers is None else cast("Mapping[str, Any]", handlers)
        self._by_name = {
            name: getattr(handler, "handler", handler) for name, handler in by_name.items()
        }
        self._registry = registry

    def given(self, items: Any, kwargs: Any, args: Any) -> dict[str, Given]:
        """Return the items of a call by name: of ``args``, or of the older ``items``."""
        if isinstance(args, ocp.args.Composite):
            return {name: self._of_args(name, value) for name, value in args.items()}
        if args is not None:
            return {ONLY: self._of_args(ONLY, args)}
        if not self._is_named:
            items = {} if items is None else {ONLY: items}
            kwargs = {} if kwargs is None else {ONLY: kwargs}
        items, kwargs = items or {}, kwargs or {}
        return {
            name: self._of_item(name, items.get(name), kwargs.get(name) or {})
            for name in dict.fromkeys((*items, *kwargs))
        }

    def _of_args(self, name: str, args: Any) -> Given:
        handler = self._by_name.get(name)
        for key in (name, None):
            if self._registry is not None and handler is None and self._registry.has(key, args):
                handler = self._registry.get(key, args)
        item = getattr(args, "item", None)
        is_tree, is_json = type(args) in _OF_TREES, type(args) in _OF_JSON
        return _given(item, args, handler, may_be_tree=is_tree, is_json=is_json)

    def _of_item(self, name: str, item: Any, kwargs: Mapping[str, Any]) -> Given:
        handler = self._by_name.get(name)
        args = SimpleNamespace(**kwargs)
        return _given(item, args, handler, may_be_tree=True, is_json=True)


def _given(item: Any, args: Any, handler: Any, *, may_be_tree: bool, is_json: bool) -> Given:
    """Return the item with its kind; without a ``handler`` Orbax's own takes it."""
    if as_stateful(item) is not None:
        return Given("iterator", item, args)
    if may_be_tree and isinstance(handler, (*_TREE_HANDLERS, type(None))):
        return Given("tree", item, args)
    is_value = is_json and isinstance(handler, ocp.JsonCheckpointHandler | None)
    return Given("value" if is_value else "", item, args)


def saved(entries: Mapping[str, Given]) -> Items:
    """Return the items of a save, as the RAM tier keeps them."""
    trees: dict[str, Any] = {}
    iterators: dict[str, Any] = {}
    values: dict[str, Any] = {}
    count = 0
    for name, entry in entries.items():
        try:
            if entry.kind == "tree":
                casts = jax.tree.leaves(getattr(entry.args, "save_args", None))
                if any(getattr(argument, "dtype", None) is not None for argument in casts):
                    return Items(unfit=f"{name!r} is saved with a cast")
                count += len(describe({name: entry.item}, "save").leaves)
                trees[name] = entry.item
            elif entry.kind == "iterator":
                iterators[name] = entry.item
            elif entry.kind == "value":
                values[name] = json.loads(json.dumps(entry.item))  # as storage would give it back
            else:
                kind = type(entry.args).__name__
                return Items(unfit=f"{name!r} of {kind}: no arrays, iterator or JSON")
        except (InvalidState, TypeError, ValueError) as error:
            return Items(unfit=f"{name!r}: {error}")
    return Items(trees, iterators, values) if count else Items(unfit="there are no trees of arrays")


def needs_template(entries: Mapping[str, Given], kept: Kept) -> bool:
    """Return whether some tree of the step is not asked for, or not completely described."""
    return any(name not in entries or not _is_described(entries[name]) for name in kept.trees)


def _is_described(entry: Given) -> bool:
    is_partial = getattr(entry.args, "partial_restore", False)
    return entry.kind == "tree" and not is_partial and saved_tree.is_complete(entry.item)


def target(entries: Mapping[str, Given], kept: Kept, template: Mapping[str, PyTree]) -> RamTarget:
    """Return all trees of a step of RAM, and the other items that are asked for, to restore into.

    Where no item is given, all items are asked for. ``template``: trees of an earlier step of
    storage, for what the caller's trees leave out.

    Raises:
      ValueError: an item is not of the step, or of another kind there; a tree is not described, has
        other leaves, or is to be changed.
    """
    names = set(entries) or kept.names
    strangers = sorted(names - kept.names)
    if strangers:
        raise ValueError(f"items {strangers} are not in the step; it has {sorted(kept.names)}")
    trees: dict[str, Any] = {}
    iterators: dict[str, Any] = {}
    parts: dict[str, Callable[[Any], Any]] = {}
    for name in kept.trees:
        tree = _wanted_tree(name, entries.get(name, Given("tree", None, None)), template)
        trees[name] = tree.target
        if name in names:
            parts[name] = tree.part_of
    for name in sorted(names - set(kept.trees)):
        parts[name] = lambda value: value
        if name in kept.iterators:
            if name not in entries or entries[name].kind != "iterator":
                raise ValueError(f"item {name!r} is an iterator, which must be given")
            iterators[name] = entries[name].item
    values = {name: None for name in names if name in kept.values}
    return Items(trees, iterators, values), parts


def _wanted_tree(name: str, entry: Given, template: Mapping[str, PyTree]) -> saved_tree.Wanted:
    if entry.args is not None and entry.kind != "tree":
        raise ValueError(f"item {name!r} is a tree of arrays in the step")
    check_transforms(entry.args)
    tree = entry.item if _is_described(entry) else template.get(name)
    if tree is None:
        raise ValueError(f"give item {name!r} as arrays or jax.ShapeDtypeStruct with shardings")
    restore_args = getattr(entry.args, "restore_args", None)
    is_partial = bool(getattr(entry.args, "partial_restore", False))
    return saved_tree.Wanted(tree, entry.item, restore_args, is_partial=is_partial)
