"""Histories of a run in a bucket: what is done there until any request, and what is seen then."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt.errors import CheckpointError

Work = Callable[[], object]


def control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def url(run: str) -> str:
    return f"gs://bucket/{run}"


def copy(run: str, to: str) -> None:
    for name in control().object_names("bucket", f"{run}/"):
        data = control().object_bytes("bucket", name)
        control().put_object("bucket", f"{to}/{name.removeprefix(f'{run}/')}", data)


def or_error(read: Work, errors: type[Exception] = CheckpointError) -> Any:
    """Return what ``read`` returns, or its error."""
    try:
        return read()
    except errors as error:
        return f"{type(error).__name__}: {error}"[:300]


def error_of(work: Work, errors: type[Exception] = CheckpointError) -> str:
    """Return the error of ``work``, or nothing."""
    return or_error(lambda: (work(), "")[1], errors)


def cut(work: Work, changes: int, errors: type[Exception] = CheckpointError) -> str:
    """Let storage take so many changes of ``work`` and no more; return its error, or nothing.

    To whoever looks afterwards that is as if the process had died there.
    """
    with control().fault(FaultRule(kind="status", status_code=403, method="[DP]*", skip=changes)):
        return error_of(work, errors)


def each_history(
    name: str, at: Callable[[str, int], dict[str, Any]], goes_on: str, before: str | None = None
) -> list[dict[str, Any]]:
    """Return what ``at`` tells in a directory of its own, for 0, 1, … until ``goes_on`` is empty.

    Each directory has what ``before`` has.
    """
    found: list[dict[str, Any]] = []
    while not found or found[-1][goes_on]:
        run = f"{name}/{len(found)}"
        if before is not None:
            copy(before, run)
        found.append(at(run, len(found)))
    return found


def plain_value(manager: ocp.CheckpointManager, step: int) -> int:
    """Return what plain Orbax reads of a step: the one value of its array."""
    found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    (value,) = set(np.asarray(found.state["w"]).tolist())
    return value
