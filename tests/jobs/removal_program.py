"""A step in a bucket leaves the sight of readers; ``test_removal_on_gcs.py`` judges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from fake_gcs import GcsControl
from persistent_steps import (
    RUN_ID,
    complete_steps,
    life,
    save_over,
    value_of,
    write,
    writer_of,
)
from state_samples import on_host

from emergency_ckpt.core.step_names import COMMITTED, STEP_METADATA
from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.events import point_of
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.step_writer import StepWriter
from emergency_ckpt.types import OrbaxStep, SaveId

REMOVED = 20
ROLLED_BACK = continued(None, SaveId(10, life(1), "run"), life(2))
"""Life 2 went on from step 10."""


def control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def url(run: str) -> str:
    return f"gs://bucket/{run}"


def tier_of(run: str) -> PersistentTier:
    return PersistentTier(url(run))


def look(run: str) -> dict[str, Any]:
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


def two_saves(run: str) -> PersistentTier:
    tier, writer = tier_of(run), writer_of(tier_of(run))
    for step in (10, REMOVED):
        save_over(tier, step, step, life(1), writer=writer)
    return tier


def hidden() -> dict[str, Any]:
    """Roll the step back, then save another one of its number, up to its marker."""
    tier = two_saves("hidden")
    before = look("hidden")
    folders: list[object] = []

    def emit(name: str, **fields: object) -> None:
        if point_of(name, fields) == "persistent.removal.hidden":
            folders.append(fields["kept_as"])

    writer = writer_of(tier, emit=emit)
    writer.begin(life(2), ROLLED_BACK)
    (folder,) = folders
    seen = {**look("hidden"), "value": value_of(tier, REMOVED), "folder": folder}
    writer.begin(life(2))
    assert folders == [folder], "hidden once"
    writer.make_room(REMOVED)
    room = look("hidden")
    write(tier, REMOVED, 21, life(2))
    again = {**look("hidden"), "value": value_of(tier, REMOVED)}
    return {"before": before, "hidden": seen, "room": room, "again": again}


def hidden_without_a_log() -> dict[str, Any]:
    """Roll the step back; then a stranger removes the log, which alone named the chain."""
    tier = two_saves("log_lost")
    writer_of(tier).begin(life(2), ROLLED_BACK)
    (tier.storage.path / "host_state/log").rmtree()
    return look("log_lost")


def several_items() -> list[dict[str, Any]]:
    """What is seen of a step of two items and metrics: saved, rolled back, and removed.

    Its files name a further item, outside of the step.
    """
    tier, writer = tier_of("several"), writer_of(tier_of("several"))
    save_over(tier, 10, 10, life(1), writer=writer)
    save, data = SaveId(REMOVED, life(1), RUN_ID), b"{}"
    orbax = OrbaxStep(items=("params", "opt"), metrics={"loss": 1.5})
    handlers = StepWriter._handlers
    StepWriter._handlers = lambda writer: {**handlers(writer), "../10/state": "elsewhere"}
    tree, shards = on_host({"params": {"w": np.full(4, 20)}, "opt": np.arange(3)})
    tier.write_document(REMOVED, 0, 1, data)
    tier.write_tensors(save, tree, shards, (0,), orbax=orbax)
    documents = {0: (hashlib.sha256(data).hexdigest(), False)}
    leaves = [leaf.spec for leaf in tree.leaves]
    StepWriter._handlers = handlers
    writer.publish(tier.finish(save, documents, leaves, {}, orbax=orbax), None)
    found = [look("several")]
    writer = writer_of(tier)
    writer.begin(life(2), ROLLED_BACK)
    found.append(look("several"))
    stored = tier.describe(tier.find(REMOVED))
    found[-1]["leaves"] = sorted(stored.leaves)
    commit = control().object_bytes("bucket", "several/10/state/commit_success.txt")
    found[-1]["other"] = commit.decode()
    hidden_files = look("several")
    writer.remove([REMOVED], life(2))
    assert look("several") == hidden_files, "a hidden step is a user's alone to remove"
    writer.remove_hidden([(REMOVED, life(1))], life(2))
    return [*found, look("several")]


def late_claims() -> dict[str, Any]:
    """Save a step whose place was claimed late, by a life that hung, and leave another program's.

    The life before asked for the claim in time, and a newer life had cleared the place by then.
    """
    two_saves("source")
    claim = control().object_bytes("bucket", f"source/{REMOVED}/{STEP_METADATA}")
    theirs = json.dumps({**json.loads(claim), "custom_metadata": {}}).encode()
    tier = tier_of("late")
    save_over(tier, 10, 10, life(1))
    control().put_objects(
        "bucket", {f"late/{REMOVED}/{STEP_METADATA}": claim, f"late/30/{STEP_METADATA}": theirs}
    )
    save_over(tier, REMOVED, 21, life(2))
    return {**look("late"), "value": value_of(tier, REMOVED), "theirs": below("late", "30/")}


def write_plain(run: str, step: int, value: int) -> None:
    """Write a step with Orbax alone, in the place of the one that is there."""
    with ocp.CheckpointManager(url(run)) as manager:
        if step in manager.all_steps():
            manager.delete(step)
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, value)}))


def replaced() -> list[dict[str, Any]]:
    """Retire a step of this package, and one of plain Orbax, which Orbax has written again."""
    found: list[dict[str, Any]] = []
    for run in ("ours", "plain"):
        if run == "ours":
            two_saves(run)
        else:
            write_plain(run, 10, 10)
            write_plain(run, REMOVED, 20)
        writer = writer_of(tier_of(run))
        writer.begin(life(2))
        write_plain(run, REMOVED, 40)
        files = below(run, f"{REMOVED}/")
        writer.retire(REMOVED)
        found.append({**look(run), "same": files == below(run, f"{REMOVED}/")})
    return found


def plain_removal_in_two_lives() -> list[dict[str, Any]]:
    """Remove a step of plain Orbax; the life ends once the step's commit is gone."""
    write_plain("two", 10, 10)
    write_plain("two", REMOVED, 20)
    writer = writer_of(tier_of("two"))
    writer.begin(life(1))
    delete_objects = StorageDirectory.delete_objects

    def delete_and_die(storage: StorageDirectory, objects: dict[str, str]) -> None:
        delete_objects(storage, objects)
        raise PersistentTierError("remove", url("two"), "the life ends")

    StorageDirectory.delete_objects = delete_and_die
    writer.retire(REMOVED)
    StorageDirectory.delete_objects = delete_objects
    found = [look("two")]
    writer_of(tier_of("two")).begin(life(2))
    return [*found, look("two")]


def failed_saves_beside_others() -> dict[str, dict[str, list[str]]]:
    """What is in the place of a step after saves that failed beside files of another program.

    Each save is cleared by the next save of its own life, or by the next life. When the other
    program has taken its own file for a claim away, the step is saved.
    """
    write_plain("whole", REMOVED, 40)
    begun = {
        name.removeprefix("whole/"): data
        for name, data in control().objects("bucket", f"whole/{REMOVED}/").items()
        if not name.endswith(COMMITTED)
    }
    others = {"orbax": begun, "user": {f"{REMOVED}/eval/samples.txt": b"samples"}}
    found: dict[str, dict[str, list[str]]] = {}
    for run, objects in others.items():
        tier, writer = tier_of(run), writer_of(tier_of(run))
        save_over(tier, 10, 10, life(1), writer=writer)
        control().put_objects("bucket", {f"{run}/{name}": data for name, data in objects.items()})
        theirs = below(run, f"{REMOVED}/")
        fail_to_save(tier, writer)
        failed = place_of(run)
        save_over(tier, 30, 30, life(1), writer=writer)
        same_life = place_of(run)
        fail_to_save(tier, writer)
        writer_of(tier).begin(life(2))
        next_life = place_of(run)
        control().delete_objects("bucket", f"{run}/{REMOVED}/{STEP_METADATA}")
        save_over(tier, REMOVED, 21, life(3))
        found[run] = {
            "theirs": theirs,
            "failed": failed,
            "same life": same_life,
            "next life": next_life,
            "saved": [str(value_of(tier, REMOVED))],
        }
    return found


def place_of(run: str) -> list[str]:
    return below(run, f"{REMOVED}/") + below(run, f"host_state/{REMOVED}/")


def fail_to_save(tier: PersistentTier, writer: DirectoryWriter) -> None:
    """Begin a save of the step in life 1, which ends after its tensors, or before."""

    def fail(point: str) -> None:
        if point == "checked":
            raise PersistentTierError("save", tier.directory, "the life ends")

    with contextlib.suppress(PersistentTierError):
        save_over(tier, REMOVED, 20, life(1), writer=writer, at=fail)


if __name__ == "__main__":
    programs = (
        *(hidden, hidden_without_a_log, several_items, late_claims),
        *(replaced, plain_removal_in_two_lives, failed_saves_beside_others),
    )
    result = {program.__name__: program for program in programs}[sys.argv[1]]()
    print(json.dumps(result))
