"""Faults of storage on saves and restores, in a job of two writers; ``test_storage_faults.py``."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
from fake_gcs import FaultRule, GcsControl
from job_process import (
    Iterator,
    JobProcess,
    differences,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)

from emergency_ckpt.config import Config
from emergency_ckpt.errors import CheckpointError, PersistentTierError
from emergency_ckpt.storage import calls, step_writer
from emergency_ckpt.storage.array_writes import ArrayWrites

TIMEOUT_S = 30.0
NOTICED_WITHIN_S = 5.0
WAIT_S = 60.0

# What happens to step 10 on its way to storage; the targets are relative to the run's directory.
SAVE_FAULTS: dict[str, tuple[FaultRule, ...]] = {
    "overloaded": (FaultRule(kind="status", status_code=429, target="*/10/*", count=2),),
    "unavailable": (FaultRule(kind="status", status_code=503, target="*/10/*", count=2),),
    "reset": (
        FaultRule(kind="reset", operation="objects.insert", target="*/10/*/d/*", count=2),
        FaultRule(kind="reset", operation="uploads.chunk", target="*/10/*", count=2),
    ),
    "slow": (FaultRule(kind="trickle", bytes_per_s=2000, method="POST", target="*/10/*"),),
    "lost_reply": (
        FaultRule(kind="lose_reply", operation="objects.insert", target="*/10/*", count=2),
        FaultRule(kind="lose_reply", operation="uploads.chunk", target="*/10/*", count=2),
    ),
    "down": (FaultRule(kind="status", status_code=503, target="*/10/state/*"),),
    "stalled": (FaultRule(kind="delay", delay_s=600, method="POST", target="*/10/state/*"),),
    "denied": (FaultRule(kind="status", status_code=403, target="*/10/state/*"),),
    "beside_denied": (FaultRule(kind="status", status_code=403, target="*/host_state/10/*"),),
    "marker_denied": (
        FaultRule(kind="status", status_code=403, method="POST", target="*/10/marker.json"),
    ),
    "marker_precondition": (
        FaultRule(
            kind="status", status_code=412, method="POST", target="*/10/marker.json", count=1
        ),
    ),
    "data_precondition": (
        FaultRule(
            kind="status",
            status_code=412,
            operation="objects.insert",
            target="*/10/state/*/d/*",
            count=1,
        ),
    ),
}

RESTORE_FAULTS: dict[str, tuple[FaultRule, ...]] = {
    "overloaded": (FaultRule(kind="status", status_code=429, method="GET", count=4),),
    "unavailable": (FaultRule(kind="status", status_code=503, method="GET", count=4),),
    "reset": (FaultRule(kind="reset", operation="objects.media", after_bytes=10, count=2),),
    "truncated": (FaultRule(kind="truncate", operation="objects.media", after_bytes=10, count=2),),
    "slow": (FaultRule(kind="delay", delay_s=0.2, method="GET"),),
    "data_down": (
        FaultRule(
            kind="status", status_code=503, operation="objects.media", target="*/10/state/*d/*"
        ),
    ),
    "stalled": (
        FaultRule(kind="delay", delay_s=600, operation="objects.media", target="*/10/state/*d/*"),
    ),
    "trickling": (
        FaultRule(
            kind="trickle", bytes_per_s=5, operation="objects.media", target="*/10/state/*d/*"
        ),
    ),
    "denied": (FaultRule(kind="status", status_code=403),),
    "down": (FaultRule(kind="status", status_code=503),),
}

# What gives no answer while the rule is in force. A trickle, because it ends with its rule.
HANGS = {
    name: FaultRule(kind="trickle", bytes_per_s=1, **matched)
    for name, matched in {
        "everything": {},
        "arrays": {"method": "POST", "target": "*/state/*"},
        "marker": {"method": "POST", "target": "*/marker.json"},
        "log": {"target": "*/log/*"},
        "removal": {"method": "DELETE"},
    }.items()
}


# So many are tried on every run of the tests; the others have a run of their own.
USUAL_SAVES = ("overloaded", "lost_reply", "down", "marker_denied")
USUAL_RESTORES = ("truncated", "data_down", "denied")


def config(world: JobProcess, name: str, **more: Any) -> Any:
    settings = {
        "dir": f"gs://bucket/{name}",
        "mesh": mesh_of(world.slices),
        "save_every": 5,
        "local_save_every": 0,
        "total_timeout_s": TIMEOUT_S,
    }
    return world.config(name, **{**settings, **more})


def control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def arm(world: JobProcess, rules: tuple[FaultRule, ...]) -> None:
    world.meet()
    if world.process == 0:
        control().clear_faults()
        for rule in rules:
            control().add_fault(rule)
    world.meet()


def save_through(world: JobProcess, name: str, rules: tuple[FaultRule, ...], **more: Any) -> Any:
    """Steps 5, 10 under the fault, 15; what each came to, and the longest training step."""
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    world.events.clear()
    outcomes: dict[int, str] = {}
    longest_s = 0.0
    with config(world, name, **more).instantiate() as ckpt:
        for step in (5, 10, 15):
            arm(world, rules if step == 10 else ())
            began_s = time.monotonic()
            state, host_state = state_at(step, mesh), iterator.at(step)
            # Also in the pause after saves that have failed.
            ckpt.save(step=step, state=state, host_state=host_state, force=True)
            longest_s = max(longest_s, time.monotonic() - began_s)
            ckpt.wait_until_finished()
            try:
                ckpt.check_for_errors()
                outcomes[step] = ""
            except CheckpointError as error:
                outcomes[step] = str(error)
        arm(world, ())
    return {
        "outcomes": list(outcomes.values()),
        "failed": [event["step"] for event in world.named("persistent.failed")],
        "longest_s": longest_s,
        "at_storage": still_at_storage(),
    }


def restore_from(
    world: JobProcess, name: str, *, requested: int | None = None, **more: Any
) -> dict[str, Any]:
    mesh = mesh_of(world.slices)
    iterator = Iterator(-1)
    world.events.clear()
    began_s = time.monotonic()
    result: dict[str, Any]
    try:
        with config(world, name, **more).instantiate() as ckpt:
            step, state = ckpt.restore(requested, state=specs_on(mesh), host_state=iterator)
            world.meet()
            wrong = [] if step is None else differences(state, step, mesh)
            result = {"step": step, "wrong": wrong, "right": iterator.position // 100 == step}
    except CheckpointError as error:
        world.meet()
        result = {"error": type(error).__name__, "text": str(error)}
    result["seconds"] = time.monotonic() - began_s
    result["at_storage"] = still_at_storage()
    lose_ram(world, name)
    return result


def still_at_storage() -> list[str]:
    """Where calls to storage are that were given up and have not noticed.

    But for those that wait in Python, which ends with the interpreter
    (``test_leaving_while_a_bucket_hangs``): in fsspec, which repeats for half a minute what storage
    refuses, and for the answer to a write of a bucket's object, which must not come after the next
    save.
    """
    given_up = [t for t in threading.enumerate() if t.name.startswith("eckpt-storage")]
    for thread in given_up:
        thread.join(NOTICED_WITHIN_S)
    frames = sys._current_frames()
    return [
        "".join(traceback.format_stack(frames[thread.ident])[-8:])
        for thread in given_up
        if thread.is_alive()
        and thread.ident in frames
        and not waits_in_python(frames[thread.ident])
    ]


def waits_in_python(frame: FrameType) -> bool:
    while frame.f_globals["__name__"] == "threading" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code is calls.wait_for.__code__ and frame.f_back is not None:
        caller = frame.f_back
        caller = caller.f_back if caller.f_code is calls.result_of.__code__ else caller
        return caller is not None and caller.f_globals["__name__"] == step_writer.__name__
    return frame.f_globals["__name__"].startswith("fsspec.")


def lose_ram(world: JobProcess, name: str) -> None:
    world.meet()
    if world.process == 0:
        shutil.rmtree(world.root / name, ignore_errors=True)
    world.meet()


def usual_saves(world: JobProcess) -> Any:
    return save_under(world, [name for name in SAVE_FAULTS if name in USUAL_SAVES])


def more_saves(world: JobProcess) -> Any:
    return save_under(world, [name for name in SAVE_FAULTS if name not in USUAL_SAVES])


def save_under(world: JobProcess, faults: list[str]) -> Any:
    """Each fault of a save; then, all RAM lost, what a restore finds."""
    results: dict[str, Any] = {}
    for name in faults:
        rules = SAVE_FAULTS[name]
        saved = save_through(world, name, rules)
        lose_ram(world, name)
        result = {**saved, "then": restore_from(world, name)}
        if saved["outcomes"][1] == "":
            result["step_10"] = restore_from(world, name, requested=10)
        results[name] = result
    return results


def usual_restores(world: JobProcess) -> Any:
    return restore_under(world, [name for name in RESTORE_FAULTS if name in USUAL_RESTORES])


def more_restores(world: JobProcess) -> Any:
    return restore_under(world, [name for name in RESTORE_FAULTS if name not in USUAL_RESTORES])


def restore_under(world: JobProcess, faults: list[str]) -> Any:
    """Each fault of a restore, of a directory with steps 5 and 10."""
    name = "read"
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    with config(world, name).instantiate() as ckpt:
        for step in (5, 10):
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
        world.meet()
    lose_ram(world, name)
    results: dict[str, Any] = {}
    for fault in faults:
        arm(world, RESTORE_FAULTS[fault])
        results[fault] = restore_from(world, name)
    arm(world, ())
    for missing in ("10/state/manifest.ocdbt", "host_state/10/marker.json"):
        world.meet()
        if world.process == 0:
            control().delete_object("bucket", f"{name}/{missing}")
        results[f"missing {missing}"] = restore_from(world, name)
    return results


def stalls(world: JobProcess) -> Any:
    """A bucket that answers nothing any more, or some bytes each minute: with a small limit."""
    name, mesh, iterator = "stalls", mesh_of(world.slices), Iterator(world.process)
    limits = {"stall_timeout_s": 3.0, "total_timeout_s": 600.0}
    with config(world, name, **limits).instantiate() as ckpt:
        ckpt.save(step=5, state=state_at(5, mesh), host_state=iterator.at(5), force=True)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
        world.meet()
    lose_ram(world, name)
    results: dict[str, Any] = {}
    for fault in ("stalled", "trickling"):
        of_step_5 = [
            msgspec.structs.replace(rule, target="*/5/state/*d/*") for rule in RESTORE_FAULTS[fault]
        ]
        arm(world, tuple(of_step_5))
        results[fault] = restore_from(world, name, **limits)
    arm(world, ())
    return {**results, "then": restore_from(world, name, **limits)}


def no_bucket(world: JobProcess) -> Any:
    """Nothing can be saved or restored, and everything says so."""
    outcomes = [""]
    try:
        save_through(world, "nobucket", (), dir="gs://nobucket/run")
    except PersistentTierError as error:  # of the first save: nobody knows of the run's lives
        outcomes = [str(error)]
    lose_ram(world, "nobucket")
    return {"outcomes": outcomes, "then": restore_from(world, "nobucket", dir="gs://nobucket/run")}


def hung_storage(world: JobProcess) -> Any:
    """Each request that may hang, beside saves to RAM at each step, with the default settings."""
    return {fault: save_beside(world, fault, rule) for fault, rule in HANGS.items()}


def save_beside(world: JobProcess, fault: str, rule: FaultRule) -> dict[str, Any]:
    """Steps 1 to 12, from 5 on with ``rule`` in force; what had come of them when it was lifted."""
    name, mesh, iterator = f"hung_{fault}", mesh_of(world.slices), Iterator(world.process)
    default_s = Config().storage_wait_timeout_s
    tiers = {"local_save_every": 1, "save_every": 2, "keep_last_n": 1}
    world.events.clear()
    with config(world, name, storage_wait_timeout_s=default_s, **tiers).instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)

        def save(step: int) -> None:
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))

        if fault != "everything":  # which is the first save of a life
            save(2)
            ckpt.wait_until_finished()
        arm(world, (rule,))
        for step in range(5, 8):
            save(step)
        until(lambda: any(each.hit for each in control().fault_states()), f"{fault} hangs")
        for step in range(8, 13):
            save(step)
        # Every call has returned, and storage has not.
        until(lambda: 12 in steps_of(world, "save.complete"), "step 12 is whole in RAM")
        busy = world.named("save.skipped.busy")
        found = {
            "in_ram": steps_of(world, "save.complete"),
            "stored": steps_of(world, "persistent.complete"),
            "skipped": [e for e in busy if e["tier"] == "persistent"],
            "others": [e for e in busy if e["tier"] == "local"],
        }
        arm(world, ())
        ckpt.wait_until_finished()
        ckpt.save(step=13, state=state_at(13, mesh), host_state=iterator.at(13), force=True)
        ckpt.wait_until_finished()
        return {**found, "at_last": steps_of(world, "persistent.complete")[-1]}


def steps_of(world: JobProcess, event: str) -> list[int]:
    return [fields["step"] for fields in world.named(event)]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)


def one_writer_fails(world: JobProcess) -> Any:
    """The write of one process breaks off, of process 1 and of 0; what it comes to on both."""
    name, mesh, iterator = "breaks", mesh_of(world.slices), Iterator(world.process)
    write = ArrayWrites.write_into
    results: dict[str, Any] = {}
    directory = str(world.root / "broken_writes")
    with config(world, name, dir=directory, total_timeout_s=20.0).instantiate() as ckpt:
        for step, broken in ((5, None), (10, 1), (15, None), (20, 0)):

            def break_off(*args: Any, broken: int | None = broken, **kwargs: Any) -> Any:
                if broken == world.process:
                    raise ValueError("broken off")
                return write(*args, **kwargs)

            ArrayWrites.write_into = break_off
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
            ckpt.wait_until_finished()
            results[f"{step}"] = ""
            try:
                ckpt.check_for_errors()
            except CheckpointError as error:
                results[f"{step}"] = str(error)
            world.meet()
    return {**results, "at_storage": still_at_storage()}


if __name__ == "__main__":
    run_program(programs_of(globals()))
