"""Prefetches in one job of four real processes, each program on fresh ramdisk directories."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from job_process import (
    Iterator,
    JobProcess,
    differences,
    finish,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)
from restoring import damage_newest, lose, process_dir, train

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import Event

WAIT_S = 60.0


def recording(world: JobProcess, then: Callable[[Event], None]) -> Callable[[Event], None]:
    """A listener that notes each event, and then does what the program wants at it."""

    def listener(event: Event) -> None:
        world.events.append((event.name, dict(event.fields)))
        then(event)

    return listener


def compile_until(world: JobProcess, *names: str) -> int:
    """Compile, as a trainer does, until one of these events was seen; how often."""
    poll = threading.Event()
    for count in range(1, int(WAIT_S * 20)):
        size = jnp.zeros(count % 64 + 1)
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x)).lower(size).compile()
        if {name for name, _ in world.events} & set(names):
            return count
        poll.wait(0.05)
    raise AssertionError(f"none of {names} came: {world.events}")


def restore(
    world: JobProcess, ckpt: EmergencyCheckpointer, state: Any, host_state: Any = None
) -> dict[str, Any]:
    """Restore, compare every bit, and say what was there before the call."""
    before = [name for name, _ in world.events]
    iterator = host_state or Iterator(-1)
    try:
        step, found = ckpt.restore(state=state, host_state=iterator)
    except CheckpointError as error:
        moved = (iterator.process, iterator.position) != (-1, 0)
        return {"error": type(error).__name__, "text": str(error), "moved": moved}
    report = ckpt.last_restore
    assert step is not None
    assert report is not None
    return {
        "step": step,
        "differences": differences(found, step, mesh_of(world.slices)),
        "iterator_right": iterator.is_at(step, world.process),
        "moved": [report.bytes_local, report.bytes_peer],
        "overlapped": report.overlapped_seconds > 0,
        "received": {
            fields["holder"]: fields["size_bytes"] for fields in world.named("restore.received")
        },
        "before": before,
        "after": [name for name, _ in world.events][len(before) :],
        "unused": [fields["reason"] for fields in world.named("prefetch.unused")],
    }


def slice_lost(world: JobProcess) -> Any:
    """The survivors are kept in the middle of their own part until the others have theirs."""
    train(world, "slice", range(1, 11))
    lose(world, "slice", 2, 3)
    world.events.clear()

    def then(event: Event) -> None:
        if event.name == "restore.fetched" and world.process >= 2:
            world.meeting.put(f"fetched/{world.process}", b"")
        if event.name == "restore.planned" and world.process < 2:
            for lost in (2, 3):
                world.meeting.get(f"fetched/{lost}", WAIT_S)

    mesh = mesh_of(world.slices)
    with world.config("slice", mesh=mesh, on_event=recording(world, then)).instantiate() as ckpt:
        ckpt.prefetch(specs_on(mesh))
        compile_until(world, "prefetch.finished")
        seen = restore(world, ckpt, specs_on(mesh))
        again = saved_and_restored(world, ckpt, mesh, range(11, 21))
        world.meet()
    return [seen, again]


def saved_and_restored(
    world: JobProcess, ckpt: EmergencyCheckpointer, mesh: Mesh, steps: Iterable[int]
) -> dict[str, Any]:
    """Save ``steps``, then restore the last of them, as ``restore``."""
    for step in steps:
        iterator = Iterator(world.process).at(step)
        ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator)
    finish(ckpt)
    return restore(world, ckpt, specs_on(mesh))


def source_damaged(world: JobProcess) -> Any:
    """A survivor's newest bytes go bad while it is prefetching: all agree on the older step."""
    train(world, "damaged", range(1, 11))
    lose(world, "damaged", 2, 3)
    world.events.clear()

    def then(event: Event) -> None:
        if event.name != "restore.planned" or event.fields["step"] != 10:
            return
        if world.process == 0:
            damage_newest(process_dir(world, "damaged", 0))
            world.meeting.put("damage/done", b"")
        world.meeting.get("damage/done", WAIT_S)

    mesh = mesh_of(world.slices)
    with world.config("damaged", mesh=mesh, on_event=recording(world, then)).instantiate() as ckpt:
        ckpt.prefetch(specs_on(mesh))
        compile_until(world, "prefetch.finished", "prefetch.failed")
        seen = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return seen


def one_asks_for_another_state(world: JobProcess) -> Any:
    """The prefetch fails everywhere; the restore is as if there had been none."""
    train(world, "drift", range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    wanted = specs_on(mesh)
    if world.process == 1:
        del wanted["wide"]
    with world.config("drift", mesh=mesh).instantiate() as ckpt:
        ckpt.prefetch(wanted)
        seen = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return [seen, [fields["reason"] for fields in world.named("prefetch.failed")]]


def one_has_no_cache(world: JobProcess) -> Any:
    """One process prefetched another structure of the same leaves: it loads, and the others not."""
    train(world, "alone", range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    wanted = specs_on(mesh)
    with world.config("alone", mesh=mesh).instantiate() as ckpt:
        ckpt.prefetch(collections.OrderedDict(wanted) if world.process == 3 else wanted)
        compile_until(world, "prefetch.finished")
        seen = restore(world, ckpt, specs_on(mesh))
        again = saved_and_restored(world, ckpt, mesh, (11, 15))
        world.meet()
    return [seen, again]


def copies_lost_where_there_is_no_cache(world: JobProcess) -> Any:
    """Both copies of a part go bad after it: those that have the step agree on the older one."""
    train(world, "retry", range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    wanted = specs_on(mesh)
    with world.config("retry", mesh=mesh).instantiate() as ckpt:
        has_cache = world.process in (0, 2)
        ckpt.prefetch(wanted if has_cache else collections.OrderedDict(wanted))
        compile_until(world, "prefetch.finished")
        world.meet()
        if not has_cache:
            damage_newest(process_dir(world, "retry", world.process))
        world.meet()
        seen = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return seen


def one_never_prefetches(world: JobProcess) -> Any:
    """The others wait for it until they save; no save waits for that."""
    train(world, "never", range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    settings = {"restore_timeout_s": 600, "save_timeout_s": 60}
    with world.config("never", mesh=mesh, **settings).instantiate() as ckpt:
        if world.process != 3:
            ckpt.prefetch(specs_on(mesh))
        for step in (15, 20):
            iterator = Iterator(world.process).at(step)
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator)
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
        given_up = [fields["reason"] for fields in world.named("prefetch.given_up")]
        seen = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return [seen, given_up]


def save_comes_first(world: JobProcess) -> Any:
    return _save_comes_first(world, "first")


def save_comes_first_late_on_one(world: JobProcess) -> Any:
    """One process learns from the others alone that the prefetch is not wanted any more."""
    return _save_comes_first(world, "late", pause_s=1.0 if world.process == 3 else 0.0)


def _save_comes_first(world: JobProcess, name: str, pause_s: float = 0.0) -> Any:
    train(world, name, range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    with world.config(name, mesh=mesh).instantiate() as ckpt:
        ckpt.prefetch(specs_on(mesh))
        time.sleep(pause_s)
        iterator = Iterator(world.process).at(15)
        ckpt.save(step=15, state=state_at(15, mesh), host_state=iterator)
        finish(ckpt)
        seen = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return seen


class Stubborn(Iterator):
    """An iterator that cannot be repositioned at first, on one process."""

    refused = False

    def set_state(self, state: bytes) -> None:
        if self.process == 3 and not self.refused:
            self.refused = True
            raise ValueError("stubborn")
        super().set_state(state)


def host_state_refused(world: JobProcess) -> Any:
    """One process cannot take its host state: none has restored, and all can try again."""
    train(world, "refused", range(1, 11))
    world.events.clear()
    mesh = mesh_of(world.slices)
    with world.config("refused", mesh=mesh).instantiate() as ckpt:
        ckpt.prefetch(specs_on(mesh))
        stubborn = Stubborn(world.process)
        stubborn.at(0)
        told = restore(world, ckpt, specs_on(mesh), stubborn)
        stayed = stubborn.is_at(0, world.process)
        then = restore(world, ckpt, specs_on(mesh))
        world.meet()
    return [told, stayed, then]


if __name__ == "__main__":
    run_program(programs_of(globals()))
