"""Removes a step from a bucket, and says what is seen then; ``test_removal_on_gcs.py`` judges."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from persistent_steps import fill, save_over, value_of

from emergency_ckpt.errors import CheckpointError, PersistentTierError
from emergency_ckpt.testing.gcs import FaultRule, GcsControl
from emergency_ckpt.tiers.persistent.tier import PersistentTier

STEPS = (10, 20, 30)
REMOVED = 20
RUN = "gs://bucket/run"
EVERY = int(os.environ.get("ECKPT_SOAK_EVERY", "4"))


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


def replaced(write: str) -> list[dict[str, Any]]:
    """Storage takes k requests of a save of step 20 that is there, for each ``EVERY``-th k.

    Of each: the steps, and what 20 is then, after the next life's cleaning, and after its save.
    """
    save_over(PersistentTier(f"{RUN}/before"), 10, 10, "0")
    if write == "ours":
        save_over(PersistentTier(f"{RUN}/before"), REMOVED, REMOVED, "1")
    else:
        with ocp.CheckpointManager(f"{RUN}/before") as manager:
            manager.save(REMOVED, args=ocp.args.StandardSave({"w": np.full(4, REMOVED)}))
    names = control().object_names("bucket", "run/before/")
    objects = {name: control().object_bytes("bucket", name) for name in names}
    found: list[dict[str, Any]] = []
    while not found or not found[-1]["through"]:
        run = f"run/{len(found)}"
        for name, data in objects.items():
            control().put_object("bucket", name.replace("run/before", run), data)
        found.append(_replaced_until(run, EVERY * len(found)))
    return found


def _replaced_until(run: str, requests: int) -> dict[str, Any]:
    through = False
    rule = FaultRule(kind="status", status_code=403, method="[DP]*", skip=requests)
    with control().fault(rule), contextlib.suppress(CheckpointError):
        save_over(PersistentTier(f"gs://bucket/{run}"), REMOVED, 21, "2")
        through = True
    tier = PersistentTier(f"gs://bucket/{run}")
    steps, now = [each.step for each in tier.steps() if not each.problem], value_of(tier, REMOVED)
    tier.remove_leftovers()
    then = value_of(tier, REMOVED)
    save_over(tier, REMOVED, 22, "3")
    after = control().object_names("bucket", f"{run}/")
    below = {name.removeprefix(f"{run}/").split("/")[0] for name in after}
    return {
        "through": through,
        "steps": steps,
        "values": [now, then, value_of(tier, REMOVED)],
        "kept": sorted(name for name in below if "rolled-back" in name),
        "record": f"{run}/host_state/replacing.json" in after,
    }


if __name__ == "__main__":
    programs = (prepare, look, remove, clean_up, refused, set_aside, replaced)
    result = {program.__name__: program for program in programs}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result))
