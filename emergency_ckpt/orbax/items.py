"""The steps of the emergency manager in Orbax's types: what is saved, asked for, and described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from emergency_ckpt.core.save.save_rules import metric_number, plain_metrics
from emergency_ckpt.errors import CorruptData, HostStateError, StepNotFound
from emergency_ckpt.orbax.saved_tree import by_path
from emergency_ckpt.restore.steps import StepDescription
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import describe

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
      ValueError: no ``state``, the reserved item, an unsupported item, metadata of an item, or a
        cast.
    """
    items = _items(args, "save")
    if RESERVED in items:
        raise ValueError(f"{RESERVED!r} is a reserved name; leave it out")
    unknown = sorted(set(items) - {STATE, DATASET})
    if unknown:
        raise ValueError(f"items {unknown} cannot be kept: only {STATE!r} and {DATASET!r} can")
    if STATE not in items:
        raise ValueError(f"there is no item {STATE!r} to save")
    state = items[STATE]
    if getattr(state, "custom_metadata", None):
        raise ValueError(
            "custom_metadata of an item is not supported: give it to save(custom_metadata=...)"
        )
    for save_args in jax.tree.leaves(getattr(state, "save_args", None)):
        if getattr(save_args, "dtype", None) is not None:
            raise ValueError("save_args with a dtype are not supported: cast the state instead")
    return _value_of(state)


def host_state_of(
    args: object, custom_metadata: Mapping[str, Any] | None, metrics: Any
) -> dict[str, Any]:
    """Return the non-tensor state of this process to save."""
    items = _items(args, "save")
    return {
        DATASET: [_value_of(items[DATASET])] if DATASET in items else [],
        _CUSTOM_METADATA: None if custom_metadata is None else dict(custom_metadata),
        _METRICS: plain_metrics(metrics),
    }


def restore_target(args: object, abstract_state: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the target of ``restore``, and the function that returns its part for the caller.

    The target is ``abstract_state``, with ``partial_restore`` the caller's leaves in it. The
    function takes the restored state.

    Raises:
      ValueError: ``args`` request a transformation, or a partial restore of leaves that
        ``abstract_state`` does not have, or has with other shapes or dtypes.
    """
    state = _items(args, "restore").get(STATE)
    check_transforms(state)
    item = getattr(state, "item", None)
    if item is None or not getattr(state, "partial_restore", False):
        return abstract_state, _whole
    item_leaves, treedef = by_path(item)
    whole_leaves, whole_treedef = by_path(abstract_state)
    unknown = [
        path for path, leaf in item_leaves.items() if not _is_same(leaf, whole_leaves.get(path))
    ]
    if unknown:
        raise ValueError(
            f"partial_restore: {len(unknown)} leaves of item are not those of abstract_state,"
            f" such as {unknown[:4]}; build the manager with the state that is restored"
        )
    if len(item_leaves) == len(whole_leaves):
        return abstract_state, _whole

    def part_of(restored: Any) -> Any:
        leaves, _ = by_path(restored)
        return jax.tree.unflatten(treedef, [leaves[path] for path in item_leaves])

    leaves = [item_leaves.get(path, leaf) for path, leaf in whole_leaves.items()]
    return jax.tree.unflatten(whole_treedef, leaves), part_of


def _whole(restored: Any) -> Any:
    return restored


def check_transforms(args: object) -> None:
    """Raise ValueError for arguments of a restore that would transform the state."""
    for name, instead in _INSTEAD.items():
        if getattr(args, name, None) not in (None, False):
            raise ValueError(f"{name} is not supported: {instead}")


def _is_same(leaf: Any, state_leaf: Any) -> bool:
    kinds = [(np.shape(x), getattr(x, "dtype", type(x))) for x in (leaf, state_leaf)]
    return state_leaf is not None and kinds[0] == kinds[1]


def target_for(args: object) -> dict[str, Any] | None:
    """Return the host state to restore in place; None when no ``dataset`` is requested."""
    items = _items(args, "restore")
    if DATASET not in items:
        return None
    return {DATASET: [_value_of(items[DATASET])], _CUSTOM_METADATA: None, _METRICS: None}


def dataset_in(target: Mapping[str, Any], step: int) -> Any:
    """Return the restored ``dataset``. HostStateError when none was saved with ``step``."""
    if not target[DATASET]:
        raise HostStateError(
            "restore", f"the dataset of step {step}", "none was saved", hint="do not ask for it"
        )
    return target[DATASET][0]


def _items(args: object, operation: str) -> Mapping[str, Any]:
    if args is None and operation == "restore":
        return {}
    if not isinstance(args, ocp.args.Composite):
        raise ValueError(
            f"{operation} takes args=ocp.args.Composite(...), not {type(args).__name__}"
        )
    return dict(cast("Mapping[str, Any]", args).items())


def _value_of(args: Any) -> Any:
    """Return the value inside an argument of Orbax's or Grain's kind."""
    return cast("Any", args).item if isinstance(args, ocp.args.CheckpointArgs) else args


def step_metadata(description: StepDescription, abstract_state: Any) -> ocp.metadata.StepMetadata:
    """Return the ``StepMetadata`` of a step; see ``CheckpointManager.metadata``."""
    arrays: Any = {
        leaf.path: ocp.metadata.ArrayMetadata(
            name=leaf.path.replace("/", "."),
            directory=None,
            shape=leaf.global_shape,
            sharding=None,
            dtype=dtype_named(leaf.dtype),
        )
        for leaf in description.leaves
    }
    metrics = metrics_in(description)
    tree = describe(abstract_state, "describe")
    if set(tree.specs) == set(arrays):
        arrays = tree.unflatten(arrays)
    return ocp.metadata.StepMetadata(
        item_metadata=ocp.args.Composite(state=arrays),  # pyright: ignore[reportArgumentType]
        metrics={} if metrics is None else metrics,
        custom_metadata=dict(_host_value_in(description, _CUSTOM_METADATA) or {}),
        commit_timestamp_nsecs=(
            None if description.written_s is None else int(description.written_s * 1e9)
        ),
    )


def metrics_in(description: StepDescription) -> Any:
    """Return the metrics of a step; None when there are none."""
    return _host_value_in(description, _METRICS)


def _host_value_in(description: StepDescription, name: str) -> Any:
    host_state = description.host_state
    return host_state.get(name) if isinstance(host_state, dict) else None  # pyright: ignore[reportUnknownVariableType]


def best_of(
    steps: Iterable[int],
    description_of: Callable[[int], StepDescription],
    best_fn: Callable[[Any], float],
    best_mode: str,
) -> tuple[float, int] | None:
    """Return the step with the best metrics by ``best_fn``, the newer of equal ones, or None.

    Before the step comes its rank: of several, the highest is the best. A step whose metric is NaN
    or infinite is not ranked, nor one that this process cannot read.
    """
    sign = -1.0 if best_mode == "min" else 1.0
    ranked: list[tuple[float, int]] = []
    for step in steps:
        try:
            metrics = metrics_in(description_of(step))
        except CorruptData as error:
            logging.warning("this process leaves step %d out of best_step: %s", step, error)
            continue
        except StepNotFound:
            continue  # it is in the RAM of others
        number = None if metrics is None else metric_number(best_fn, metrics)
        if number is not None:
            ranked.append((sign * float(number), step))
    return max(ranked, default=None)
