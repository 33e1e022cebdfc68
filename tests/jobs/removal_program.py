"""Removes a step from a bucket, and says what is seen then; ``test_removal_on_gcs.py`` judges."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from bucket_histories import control, cut, each_history, error_of, url
from fake_gcs import FaultRule
from persistent_steps import (
    RUN_ID,
    complete_steps,
    fill,
    life,
    save_over,
    value_of,
    write,
    writer_of,
)
from state_samples import on_host

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.steps.inspection import ours_of
from emergency_ckpt.types import OrbaxStep, SaveId

STEPS = (10, 20, 30)
REMOVED = 20
RUN = "run"
EVERY = int(os.environ.get("ECKPT_SOAK_EVERY", "4"))
ROLLED_BACK = continued(None, SaveId(10, life(1), "run"), life(2))
"""Life 2 went on from step 10."""


def tier_of(run: str) -> PersistentTier:
    return PersistentTier(url(run))


def look(run: str = RUN) -> dict[str, Any]:
    """What our readers, plain Orbax's manager and its checkpointer see, and what is there."""
    tier = tier_of(run)
    with ocp.CheckpointManager(url(run)) as manager:
        listed = list(manager.all_steps())
    item = ocp.utils.is_checkpoint_finalized(f"{url(run)}/{REMOVED}/state")
    return {
        "ours": [found.step for found in tier.found.resolved(tier.found.view())],
        "whole": complete_steps(tier),
        "manager": listed,
        "checkpointer": item,
        "objects": below(run, f"{REMOVED}/"),
        "beside": below(run, f"host_state/{REMOVED}/"),
    }


def below(run: str, folder: str) -> list[str]:
    """The names of the objects in a folder, from there on."""
    prefix = f"{run}/{folder}"
    return [name.removeprefix(prefix) for name in control().object_names("bucket", prefix)]


def remove(run: str = RUN) -> None:
    writer_of(tier_of(run)).remove([REMOVED], life(2))


def prepare() -> dict[str, Any]:
    fill(f"gs://bucket/{RUN}", STEPS)
    return look()


def clean_up(run: str = RUN) -> dict[str, Any]:
    """What the first save of the next life does."""
    removed: list[object] = []

    def tell(event: Event) -> None:
        if event.name == "persistent.removed":
            removed.append(event.fields["step"])

    writer_of(tier_of(run), emit=EventSink(tell, process_index=0).emit).begin(life(3))
    return {"removed": removed, **look(run)}


def refused() -> list[dict[str, Any]]:
    """Storage takes k requests of the removal and no more, for each k until it is through."""

    def at(run: str, k: int) -> dict[str, Any]:
        error = cut(lambda: remove(run), k, PersistentTierError)
        return {"error": error, **look(run), "then": clean_up(run)}

    return each_history("refused", at, "error", RUN)


def two_saves(run: str) -> PersistentTier:
    tier, writer = tier_of(run), writer_of(tier_of(run))
    for step in (10, REMOVED):
        save_over(tier, step, step, life(1), writer=writer)
    return tier


def set_aside() -> dict[str, Any]:
    """Roll the step back, then save another one of its number, up to its marker."""
    tier = two_saves("aside")
    before = look("aside")
    writer = writer_of(tier)
    (rolled_back,) = writer.begin(life(2), ROLLED_BACK)
    hidden = {**look("aside"), "value": value_of(tier, REMOVED)}
    assert writer.begin(life(2)) == []
    moved = writer.make_room(REMOVED, "saved anew")
    assert moved is not None
    assert moved.folder == rolled_back.folder
    seen = {**look("aside"), "value": value_of(tier, REMOVED)}
    kept = below("aside", f"{moved.folder}/")
    write(tier, REMOVED, 21, life(2))
    again = {**look("aside"), "value": value_of(tier, REMOVED)}
    return {"before": before, "hidden": hidden, "then": seen, "kept": kept, "again": again}


def several_items() -> list[dict[str, Any]]:
    """What is seen of a step of two items and metrics: saved, rolled back, back, and removed.

    Its files name a further item, outside of the step.
    """
    tier, writer = tier_of("several"), writer_of(tier_of("several"))
    save_over(tier, 10, 10, life(1), writer=writer)
    save, data = SaveId(REMOVED, life(1), RUN_ID), b"{}"
    orbax = OrbaxStep(
        items=("params", "opt"), handlers={"../10/state": "elsewhere"}, metrics={"loss": 1.5}
    )
    tree, shards = on_host({"params": {"w": np.full(4, 20)}, "opt": np.arange(3)})
    tier.write_document(REMOVED, 0, 1, data)
    tier.write_tensors(save, tree, shards, (0,), orbax=orbax)
    documents = {0: (hashlib.sha256(data).hexdigest(), False)}
    leaves = [leaf.spec for leaf in tree.leaves]
    writer.publish(tier.finish(save, documents, leaves, {}, orbax=orbax), None)
    found = [look("several")]
    writer = writer_of(tier)
    writer.begin(life(2), ROLLED_BACK)
    found.append(look("several"))
    writer = writer_of(tier)
    writer.begin(life(3), continued(None, save, life(3)))
    found.append(look("several"))
    stored = tier.describe(tier.find(REMOVED))
    found[-1]["leaves"] = sorted(stored.leaves)
    commit = control().object_bytes("bucket", "several/10/state/commit_success.txt")
    found[-1]["other"] = commit.decode()
    writer.remove([REMOVED], life(3))
    return [*found, look("several")]


def rolled_back() -> list[dict[str, Any]]:
    """Storage takes k requests of a rollback to step 10, for each k until it is through.

    Of each: what is seen, what a reader finds of step 20, and the same after the next life's start.
    """
    two_saves("before")

    def at(run: str, k: int) -> dict[str, Any]:
        tier = tier_of(run)
        error = cut(lambda: writer_of(tier).begin(life(2), ROLLED_BACK), k, PersistentTierError)
        first = {**look(run), "value": value_of(tier, REMOVED)}
        then = {**clean_up(run), "value": value_of(tier, REMOVED)}
        return {"error": error, **first, "then": then}

    return each_history("rolled", at, "error", "before")


def replaced(write: str) -> list[dict[str, Any]]:
    """Storage takes k requests of a save of step 20 that is there, for each ``EVERY``-th k.

    Of each: the steps, and what 20 is then, after the next life's cleaning, and after its save.
    """
    if write == "ours":
        two_saves("before")
    else:
        save_over(tier_of("before"), 10, 10, life(1))
        with ocp.CheckpointManager("gs://bucket/before") as manager:
            manager.save(REMOVED, args=ocp.args.StandardSave({"w": np.full(4, REMOVED)}))
    return each_history("replaced", _replaced_until, "error", "before")


def unheard(what: str) -> list[dict[str, Any]]:
    """The reply to the k-th change of what is done gets lost, for each k until there is none."""
    two_saves("before")
    works: dict[str, Callable[[PersistentTier], object]] = {
        "first save": lambda tier: save_over(tier, 30, 30, life(1)),
        "save": lambda tier: save_over(tier, 30, 30, life(2)),
        "save again": lambda tier: save_over(tier, REMOVED, 21, life(2)),
        "removal": lambda tier: writer_of(tier).remove([REMOVED], life(2)),
        "rollback": lambda tier: writer_of(tier).begin(life(2), ROLLED_BACK),
    }

    def at(run: str, k: int) -> dict[str, Any]:
        rule = FaultRule(kind="lose_reply", method="[DP]*", skip=k, count=1)
        tier = tier_of(run)
        with control().fault(rule):
            error = error_of(lambda: works[what](tier))
            hits = sum(each.hit for each in control().fault_states())
        values = [(step, value_of(tier, step)) for step in complete_steps(tier)]
        seen = {"hits": hits, "error": error, "values": values, "plain": look(run)["manager"]}
        return {**seen, "then": clean_up(run)["whole"]}

    before = None if what == "first save" else "before"
    return each_history("unheard", at, "hits", before)


def _replaced_until(run: str, k: int) -> dict[str, Any]:
    tier = tier_of(run)
    error = cut(lambda: save_over(tier_of(run), REMOVED, 21, life(2)), EVERY * k)
    marked = is_marked(run, life(2))
    steps, now = complete_steps(tier), value_of(tier, REMOVED)
    writer = writer_of(tier)
    writer.begin(life(3))
    then = value_of(tier, REMOVED)
    save_over(tier, REMOVED, 22, life(3), writer=writer)
    after = control().object_names("bucket", f"{run}/")
    names = {name.removeprefix(f"{run}/").split("/")[0] for name in after}
    table = tier.found.log.read().table
    assert table is not None
    return {
        "error": error,
        "steps": steps,
        "marked": marked,
        "values": [now, then, value_of(tier, REMOVED)],
        "kept": sorted(name for name in names if "rolled-back" in name),
        "unsettled": [e.step for e in table.steps if e.pending or e.state == "removing"],
    }


def is_marked(run: str, incarnation: str) -> bool:
    """Whether the step has both markers of a save."""
    found = [f"{REMOVED}/_CHECKPOINT_METADATA", f"host_state/{REMOVED}/marker.json"]
    there = control().object_names("bucket", f"{run}/")
    if not {f"{run}/{name}" for name in found} <= set(there):
        return False
    metadata, marker = (control().object_bytes("bucket", f"{run}/{name}") for name in found)
    of_tensors = json.loads(marker)["marker"]["tensors"]["metadata"]
    whose = (ours_of(metadata) or {}).get("incarnation")
    return whose == incarnation and hashlib.sha256(metadata).hexdigest() == of_tensors


if __name__ == "__main__":
    programs = (
        *(prepare, look, remove, clean_up, refused),
        *(set_aside, several_items, rolled_back, replaced, unheard),
    )
    result = {program.__name__: program for program in programs}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result))
