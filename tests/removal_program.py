"""Removes a step from a bucket, and says what is seen then; ``test_removal_on_gcs.py`` judges."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import orbax.checkpoint as ocp
from persistent_steps import fill

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.testing.gcs import FaultRule, GcsControl
from emergency_ckpt.tiers.persistent import PersistentTier

STEPS = (10, 20, 30)
REMOVED = 20
RUN = "gs://bucket/run"


def look() -> dict[str, Any]:
    """What our readers, plain Orbax's manager and its checkpointer see, and what is there."""
    tier = PersistentTier(RUN)
    with ocp.CheckpointManager(RUN) as manager:
        listed = list(manager.all_steps())
    item = ocp.utils.is_checkpoint_finalized(f"{RUN}/{REMOVED}/default")
    return {
        "ours": [found.step for found in tier.steps()],
        "whole": tier.whole_steps(),
        "manager": listed,
        "checkpointer": item,
        "objects": control().object_names("bucket", f"run/{REMOVED}/"),
        "beside": control().object_names("bucket", f"run/host_state/{REMOVED}/"),
    }


def control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def remove() -> None:
    PersistentTier(RUN).remove(REMOVED)


def prepare() -> dict[str, Any]:
    fill(RUN, STEPS)
    return look()


def clean_up() -> dict[str, Any]:
    removed, left = PersistentTier(RUN).remove_leftovers()
    assert left == []
    return {"removed": removed, **look()}


def refused() -> list[dict[str, Any]]:
    """Storage takes k requests of the removal and no more, for each k until it is through.

    To whoever looks afterwards that is as if the process had died there.
    """
    names = control().object_names("bucket", "run/")
    kept = {name: control().object_bytes("bucket", name) for name in names}
    found: list[dict[str, Any]] = []
    through = False
    while not through:
        for name in names:
            control().put_object("bucket", name, kept[name])
        skip = len(found)
        rule = FaultRule(kind="status", status_code=403, method="[DP]*", skip=skip)
        with control().fault(rule):
            try:
                PersistentTier(RUN).remove(REMOVED)
                through = True
            except PersistentTierError:
                through = False
        found.append({"through": through, **look(), "then": clean_up()})
    return found


def set_aside() -> dict[str, Any]:
    """Hide the step, then make room for another one of its number."""
    tier = PersistentTier(RUN)
    kept_as = tier.changes.set_aside(REMOVED, "rolled back")
    hidden = look()
    assert tier.remove_leftovers() == ([], [])
    assert tier.changes.make_room(REMOVED, "saved anew") == kept_as
    kept = control().object_names("bucket", f"run/{kept_as}/")
    return {"hidden": hidden, "then": look(), "kept": [name.split("/", 2)[2] for name in kept]}


if __name__ == "__main__":
    programs = (prepare, look, remove, clean_up, refused, set_aside)
    result = {program.__name__: program for program in programs}[sys.argv[1]]()
    print(json.dumps(result))
