"""Programs in which a process kills itself at a named point, and what the next life makes of it.

Every save is of the same run; a case is a directory with a ramdisk for each host. Steps 5 and 10
are complete before step 15 is tried, so both slots are in use and step 5 is being overwritten.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from buffered import with_buffers
from crashes import RESTORE_RETURNED, Kill
from fake_gcs import FaultRule, GcsControl
from job_process import (
    Iterator,
    JobProcess,
    differences,
    finish,
    mesh_of,
    run_program,
    specs_on,
    state_at,
)

from emergency_ckpt import CheckpointerConfig, EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.events import Event
from emergency_ckpt.extras.progress import report_step

RUN_ID = "crash"
COMPLETE, TRIED = 10, 15
WAIT_S = 60.0
CHANGED = "[5g]/*"
"""What a save changes: the folders ``15``, and the ``log``."""
THROUGH = 1
"""What a process reports as its step when its part of the persistent save is done."""
CHANGES = frozenset(
    {"open", "os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
)
"""Audit events of Python for what changes a directory; ``open`` only for writing."""


class Killer:
    """The listener of both processes: the victim's kills, the survivor's keeps its distance."""

    BEGINS = "save.started"
    ALONE = "save.stage.pushed"
    """The last event of a process's part before it needs the others."""

    def __init__(self, world: JobProcess, kill: Kill) -> None:
        self.world = world
        self.kill = kill

    def concerns(self, event: Event) -> bool:
        return event.fields.get("step") == TRIED

    def __call__(self, event: Event) -> None:
        if not self.concerns(event):
            return
        kill, meeting = self.kill, self.world.meeting
        if self.world.process == kill.victim:
            # In the middle of the copying: some shards are in the slot and some are not.
            if event.point == kill.point and event.fields.get("shards") in (None, 3):
                if kill.survivor == "ahead":
                    meeting.get("ahead", WAIT_S)
                os.kill(os.getpid(), signal.SIGKILL)
        elif kill.survivor == "behind" and event.point == self.BEGINS:
            # Until the end of this life: not on the service, which dies with process 0.
            threading.Event().wait(WAIT_S)
        elif event.point == self.ALONE:
            meeting.put("ahead", b"")


class RestoreKiller(Killer):
    ALONE = "restore.stage.fetched"

    def concerns(self, event: Event) -> bool:
        return True


class PersistentKiller(Killer):
    ALONE = ""

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if not self.concerns(event):
            return
        dies = self.world.process == self.kill.victim
        kind, mark, _ = self.kill.point.partition("#" if "#" in self.kill.point else ":")
        if event.point == "persistent.stage.started" and mark:
            if kind == "request":
                self.arm_request(dies=dies)
            elif dies:
                self.arm_file()
        if event.name == "persistent.complete":
            report_step(THROUGH)
            if dies and mark:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm_request(self, *, dies: bool) -> None:
        """One request of the save hangs, unapplied; whoever sent it, the victim dies then."""
        control = bucket_control()
        glob, _, number = self.kill.point.removeprefix("request:").partition("#")
        glob = f"bucket/{self.kill.name}/persistent/*{CHANGED if number else glob}"
        if self.world.process == 0:  # it is the first to change anything
            control.add_fault(
                FaultRule(
                    kind="delay",
                    delay_s=600,
                    method="[DP]*" if number else "POST",
                    target=glob,
                    skip=int(number or 0),
                    count=1,
                )
            )

        def die_when_it_hangs() -> None:
            while not any(s.hit and s.rule.target == glob for s in control.fault_states()):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if dies:
            threading.Thread(target=die_when_it_hangs, daemon=True).start()

    def arm_file(self) -> None:
        """Die before a change to the step's files. What TensorStore writes, Python does not see."""
        left = itertools.count(int(self.kill.point.partition("#")[2]), -1)
        directory = directory_of(self.world, self.kill.name)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in CHANGES or (event == "open" and not arguments[2] & os.O_ACCMODE):
                return
            paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
            below = [path.removeprefix(directory) for path in paths if path.startswith(directory)]
            if any("/15" in path or "/log/" in path for path in below) and next(left) <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)


def bucket_control() -> GcsControl:
    return GcsControl(os.environ["STORAGE_EMULATOR_HOST"])


def directory_of(world: JobProcess, name: str) -> str:
    """The persistent directory of a case: those in a bucket have that in their name."""
    if "bucket" in name:
        return f"gs://bucket/{name}/persistent"
    return str(world.root / name / "persistent")


def crash_in_save(world: JobProcess, kill: Kill, **settings: Any) -> None:
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    settings.setdefault("on_event", Killer(world, kill))
    config = world.config(kill.name, run_id=RUN_ID, mesh=mesh, **settings)
    with with_buffers(Buffers(copy_batch_bytes=1))(config) as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in (COMPLETE - 5, COMPLETE, TRIED):
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
            finish(ckpt)
            world.meet()


def crash_in_persistent_save(world: JobProcess, kill: Kill) -> None:
    settings = {"dir": directory_of(world, kill.name), "save_every": 5}
    crash_in_save(world, kill, on_event=PersistentKiller(world, kill), **settings)


def crash_in_restore(world: JobProcess, kill: Kill) -> None:
    mesh = mesh_of(world.slices)
    listener = RestoreKiller(world, kill)
    config = world.config(kill.name, run_id=RUN_ID, mesh=mesh, on_event=listener)
    with config.instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=Iterator(-1))
        if (kill.point, kill.victim) == (RESTORE_RETURNED, world.process):
            os.kill(os.getpid(), signal.SIGKILL)
        world.meet()


def recover(world: JobProcess, name: str) -> dict[str, Any]:
    """Restore, and go on: the saves after a crash must go as well as those before it."""
    mesh = mesh_of(world.slices)
    config = world.config(name, run_id=RUN_ID, mesh=mesh)
    with config.instantiate() as ckpt:
        seen = restored(world, ckpt, mesh)
        if "+" not in name:
            seen["saved"] = save_on(world, ckpt, mesh, seen["step"])
        world.meet()
    ramdisk = world.ramdisk(name)
    # A file of the quarantine says that a scan found damage: a crash leaves none.
    seen["leftovers"] = [*leftovers(ramdisk, ".tmp-*"), *leftovers(ramdisk, "quarantine/*")]
    seen["slots"] = sorted(path.name for path in ramdisk.rglob("slot_*.bin"))
    return seen


def recover_persistent(world: JobProcess, name: str) -> dict[str, Any]:
    """All RAM is lost: restore, save on, lose all RAM again, and restore what was saved.

    After a kill in mid-stage step 15 is not tried again: what is left of it must go all the same.
    """
    mesh = mesh_of(world.slices)
    directory = directory_of(world, name)

    def config(life: str) -> CheckpointerConfig:
        settings = {"dir": directory, "save_every": 5, "mesh": mesh}
        return world.config(f"{name}/{life}", run_id=RUN_ID, **settings)

    with config("second").instantiate() as ckpt:
        seen = restored(world, ckpt, mesh)
        after = seen["step"] if "persistent." in name else max(seen["step"], TRIED)
        seen["saved"] = save_on(world, ckpt, mesh, after)
        world.meet()
    seen["leftovers"] = persistent_leftovers(directory, seen["saved"])
    with config("third").instantiate() as ckpt:
        seen["again"] = restored(world, ckpt, mesh)
        world.meet()
    return seen


def persistent_leftovers(directory: str, steps: list[int]) -> list[str]:
    """Files and objects that belong to no step, or to one that does not count.

    A temporary file of the log may stay as long as its version: the writer may be alive till then.
    """
    if directory.startswith("gs://bucket/"):
        prefix = directory.removeprefix("gs://bucket/") + "/"
        found = [n.removeprefix(prefix) for n in bucket_control().object_names("bucket", prefix)]
    else:
        root = Path(directory)
        found = [str(path.relative_to(root)) for path in root.rglob("*")]
    kept = {str(step) for step in steps} | {"host_state", "log"}
    wrong: list[str] = []
    for name in found:
        first, *rest = name.split("/")
        owner = rest[0] if first == "host_state" and rest else first
        version = re.fullmatch(r"host_state/log/[0-9a-f]{16}\.([0-9]{12}\.json)\.tmp", name)
        if version and f"host_state/log/{version[1]}" in found:
            continue
        if owner not in kept or "tmp" in name:
            wrong.append(name)
    return wrong


def restored(world: JobProcess, ckpt: EmergencyCheckpointer, mesh: Any) -> dict[str, Any]:
    iterator = Iterator(-1)
    step, state = ckpt.restore(state=specs_on(mesh), host_state=iterator)
    if step is None:
        return {"step": None}
    assert ckpt.last_restore is not None
    return {
        "step": step,
        "tier": ckpt.last_restore.tier,
        "differences": differences(state, step, mesh),
        "iterator_right": iterator.is_at(step, world.process),
    }


def save_on(world: JobProcess, ckpt: EmergencyCheckpointer, mesh: Any, step: int) -> list[int]:
    """Two more saves, for both slots; the steps that are whole then, as this process knows."""
    iterator = Iterator(world.process)
    for later in (step + 5, step + 10):
        ckpt.save(step=later, state=state_at(later, mesh), host_state=iterator.at(later))
        finish(ckpt)
    # Other processes may still be writing for the persistent tier.
    world.meet()
    return ckpt.all_steps()


def leftovers(directory: Path, pattern: str) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob(pattern)]


CRASHES = {
    program.__name__: program
    for program in (
        crash_in_save,
        crash_in_persistent_save,
        crash_in_restore,
    )
}

if __name__ == "__main__":
    case = Kill.from_environ()
    if case is not None:
        crashing = CRASHES[case.program]
        run_program({case.name: functools.partial(crashing, kill=case)})
    else:
        program, *names = sys.argv[3:]
        del sys.argv[3]
        recovery = {"recover": recover, "recover_persistent": recover_persistent}[program]
        run_program({name: functools.partial(recovery, name=name) for name in names})
