"""The items of a step other than its tensors: data iterator, user's metadata, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from emergency_ckpt.core.save.save_rules import plain_metrics
from emergency_ckpt.errors import HostStateError
from emergency_ckpt.orbax.saved_tree import by_path

STATE, DATASET, RESERVED = "state", "dataset", "process_metadata"
_INSTEAD = {
    "transforms": "transform the restored state",
    "legacy_transform_fn": "transform the restored state",
    "fallback_sharding": "give the leaves of the tree their shardings",
}
"""Arguments of a restore that are refused, and what to do instead."""
_CUSTOM_METADATA, _METRICS = "custom_metadata", "metrics"


def state_of(args: object) -> Any:
    """Return the pytree to save.

    Raises:
      ValueError: no ``state``, the reserved item, an unsupported item, or a cast.
    """
    items = _items(args, "save")
    if RESERVED in items:
        raise ValueError(f"{RESERVED!r} is a reserved name; leave it out")
    unknown = sorted(set(items) - {STATE, DATASET})
    if unknown:
        raise ValueError(f"items {unknown} cannot be kept: only {STATE!r} and {DATASET!r} can")
    if STATE not in items:
        raise ValueError(f"there is no item {STATE!r} to save")
    check_casts(items[STATE])
    return _item_of(items[STATE])


def check_casts(args: object) -> None:
    """Raise ValueError for arguments of a save that would change a dtype, or have metadata."""
    if getattr(args, "custom_metadata", None):
        raise ValueError(
            "custom_metadata of an item is not supported: give it to save(custom_metadata=...)"
        )
    if any(_casts(save) for save in jax.tree.leaves(getattr(args, "save_args", None))):
        raise ValueError("save_args with a dtype are not supported: cast the state instead")


def _casts(save_args: object) -> bool:
    return getattr(save_args, "dtype", None) is not None


def host_state_of(
    args: object, custom_metadata: Mapping[str, Any] | None, metrics: Any
) -> dict[str, Any]:
    """Return the non-tensor state of this process to save."""
    items = _items(args, "save")
    return {
        DATASET: [_item_of(items[DATASET])] if DATASET in items else [],
        **metadata_of(custom_metadata, metrics),
    }


def metadata_of(custom_metadata: Mapping[str, Any] | None, metrics: Any) -> dict[str, Any]:
    """Return the host state with these two; for None and None, the target of a restore."""
    return {
        _CUSTOM_METADATA: None if custom_metadata is None else dict(custom_metadata),
        _METRICS: plain_metrics(metrics),
    }


class RestoreTarget(NamedTuple):
    """The target of a restore, and the part of it that is returned.

    Attributes:
      state: the manager's abstract state, with the leaves that ``args`` override.
      paths: of the returned leaves, in the order of ``treedef``; None: all.
    """

    state: Any
    paths: tuple[str, ...] | None = None
    treedef: Any = None

    def part_of(self, restored: Any) -> Any:
        """Return the part of the restored state that the caller asked for."""
        if self.paths is None:
            return restored
        leaves, _ = by_path(restored)
        return jax.tree.unflatten(self.treedef, [leaves[path] for path in self.paths])


def restore_target(args: object, abstract_state: Any) -> RestoreTarget:
    """Return the target of ``restore``: ``abstract_state``, or part of it with ``partial_restore``.

    Raises:
      ValueError: ``args`` request a transformation, or a partial restore of leaves that
        ``abstract_state`` does not have, or has with other shapes or dtypes.
    """
    given = {} if args is None else _items(args, "restore")
    state = given.get(STATE)
    check_transforms(state)
    item = getattr(state, "item", None)
    if item is None or not getattr(state, "partial_restore", False):
        return RestoreTarget(abstract_state)
    wanted, treedef = by_path(item)
    known, whole_treedef = by_path(abstract_state)
    unknown = [path for path, leaf in wanted.items() if not _is_same(leaf, known.get(path))]
    if unknown:
        raise ValueError(
            f"partial_restore: {len(unknown)} leaves of item are not those of abstract_state,"
            f" such as {unknown[:4]}; build the manager with the state that is restored"
        )
    if len(wanted) == len(known):
        return RestoreTarget(abstract_state)
    leaves = [wanted.get(path, leaf) for path, leaf in known.items()]
    return RestoreTarget(jax.tree.unflatten(whole_treedef, leaves), tuple(wanted), treedef)


def check_transforms(args: object) -> None:
    """Raise ValueError for arguments of a restore that would transform the state."""
    for name, instead in _INSTEAD.items():
        if getattr(args, name, None) not in (None, False):
            raise ValueError(f"{name} is not supported: {instead}")


def _is_same(leaf: Any, known: Any) -> bool:
    kinds = [(np.shape(x), getattr(x, "dtype", type(x))) for x in (leaf, known)]
    return known is not None and kinds[0] == kinds[1]


def target_for(args: object) -> dict[str, Any] | None:
    """Return the host state to restore in place; None when no ``dataset`` is requested."""
    items = {} if args is None else _items(args, "restore")
    if DATASET not in items:
        return None
    return {DATASET: [_item_of(items[DATASET])], **metadata_of(None, None)}


def dataset_in(target: Mapping[str, Any], step: int) -> Any:
    """Return the restored ``dataset``. HostStateError when none was saved with ``step``."""
    if not target[DATASET]:
        raise HostStateError(
            "restore", f"the dataset of step {step}", "none was saved", hint="do not ask for it"
        )
    return target[DATASET][0]


def metadata_in(host_state: Any) -> dict[str, Any]:
    """Return the user's metadata of a step."""
    return dict(_found_in(host_state, _CUSTOM_METADATA) or {})


def metrics_in(host_state: Any) -> Any:
    """Return the metrics of a step; None when there are none."""
    return _found_in(host_state, _METRICS)


def _found_in(host_state: Any, name: str) -> Any:
    return host_state.get(name) if isinstance(host_state, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _items(args: object, operation: str) -> Mapping[str, Any]:
    if not isinstance(args, ocp.args.Composite):
        raise ValueError(
            f"{operation} takes args=ocp.args.Composite(...), not {type(args).__name__}"
        )
    return dict(cast("Mapping[str, Any]", args).items())


def _item_of(args: Any) -> Any:
    """Return the value inside an argument of Orbax's or Grain's kind."""
    return cast("Any", args).item if isinstance(args, ocp.args.CheckpointArgs) else args
