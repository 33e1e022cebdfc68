"""What is saved beside the tensors: the data iterator, the user's metadata, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

from emergency_ckpt.core.save_decision import plain_metrics
from emergency_ckpt.errors import HostStateError

STATE, DATASET, RESERVED = "state", "dataset", "process_metadata"
_CUSTOM_METADATA, _METRICS = "custom_metadata", "metrics"


def state_of(args: object) -> Any:
    """The pytree to save.

    Raises:
      ValueError: no ``state``, the reserved item, an item that is not kept, or a cast.
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
    casts = [save for save in jax.tree.leaves(getattr(state, "save_args", None)) if _casts(save)]
    if casts:
        raise ValueError("save_args with a dtype are not supported: cast the state instead")
    return _item_of(state)


def _casts(save_args: object) -> bool:
    return getattr(save_args, "dtype", None) is not None


def host_state_of(
    args: object, custom_metadata: Mapping[str, Any] | None, metrics: Any
) -> dict[str, Any]:
    """What ``save`` keeps of this process besides the tensors."""
    items = _items(args, "save")
    return {
        DATASET: [_item_of(items[DATASET])] if DATASET in items else [],
        _CUSTOM_METADATA: None if custom_metadata is None else dict(custom_metadata),
        _METRICS: plain_metrics(metrics),
    }


def target_for(args: object) -> dict[str, Any] | None:
    """What ``restore`` puts back in place; None when no ``dataset`` is asked for."""
    items = {} if args is None else _items(args, "restore")
    if DATASET not in items:
        return None
    return {DATASET: [_item_of(items[DATASET])], _CUSTOM_METADATA: None, _METRICS: None}


def dataset_in(target: Mapping[str, Any], step: int) -> Any:
    """The restored ``dataset``. HostStateError when none was saved with ``step``."""
    if not target[DATASET]:
        raise HostStateError(
            "restore", f"the dataset of step {step}", "none was saved", hint="do not ask for it"
        )
    return target[DATASET][0]


def metadata_in(host_state: Any) -> dict[str, Any]:
    """The user's metadata of a step."""
    return dict(_found_in(host_state, _CUSTOM_METADATA) or {})


def metrics_in(host_state: Any) -> Any:
    """The metrics of a step; None when there are none."""
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
    """What a value of Orbax's or Grain's kind of arguments is about."""
    return cast("Any", args).item if isinstance(args, ocp.args.CheckpointArgs) else args
