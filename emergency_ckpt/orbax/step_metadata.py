"""Descriptions of a step in Orbax's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from emergency_ckpt.core.save.retention_rules import metric_number
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.orbax import items
from emergency_ckpt.restore.steps import StepDescription
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import describe


def step_metadata(description: StepDescription, abstract_state: Any) -> ocp.metadata.StepMetadata:
    """Return the ``StepMetadata`` of a step; see ``CheckpointManager.metadata``."""
    written_ns = None if description.written_s is None else int(description.written_s * 1e9)
    return ocp.metadata.StepMetadata(
        item_metadata=ocp.args.Composite(state=_arrays(description, abstract_state)),  # pyright: ignore[reportArgumentType]
        metrics=items.metrics_in(description.host_state) or {},
        custom_metadata=items.metadata_in(description.host_state),
        commit_timestamp_nsecs=written_ns,
    )


def _arrays(description: StepDescription, abstract_state: Any) -> Any:
    arrays = {
        leaf.path: ocp.metadata.ArrayMetadata(
            name=leaf.path.replace("/", "."),
            directory=None,
            shape=leaf.global_shape,
            sharding=None,
            dtype=dtype_named(leaf.dtype),
        )
        for leaf in description.leaves
    }
    tree = describe(abstract_state, "describe")
    return tree.unflatten(arrays) if set(tree.specs) == set(arrays) else arrays


def best_of(
    steps: Iterable[int],
    metrics_of: Callable[[int], Any],
    best_fn: Callable[[Any], float],
    best_mode: str,
) -> int | None:
    """Return the step with the best metrics by ``best_fn``, the newer of equal ones, or None.

    A step whose metric is NaN or infinite is not ranked.
    """
    sign = -1.0 if best_mode == "min" else 1.0
    ranked: list[tuple[float, int]] = []
    for step in steps:
        try:
            metrics = metrics_of(step)
        except CorruptData as error:
            logging.warning("best_step leaves out step %d: %s", step, error)
            continue
        number = None if metrics is None else metric_number(best_fn, metrics)
        if number is not None:
            ranked.append((sign * number, step))
    return max(ranked)[1] if ranked else None
