"""Jobs that go back to an older step while some hosts are away with RAM of the old timeline."""

from __future__ import annotations

import shutil
from typing import Any

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
from restoring import lose

from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.server import Session

AWAY = (2, 3)
"""The hosts of slice 1: together they hold a whole copy of the old timeline's newest step."""
OLD_LIFE, NEW_LIFE = 0, 1000
"""Added to a step, the step whose values the state of that timeline has."""


def _train(
    world: JobProcess, name: str, last: int, life: int, since: int | None, **more: Any
) -> Any:
    """Go on from step ``since``, if any, and save each fifth step up to ``last``."""
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    with world.config(name, mesh=mesh, local_keep_last_n=2, **more).instantiate() as ckpt:
        found, _ = ckpt.restore(since, state=specs_on(mesh), host_state=iterator)
        for step in range((since or 0) + 1, last + 1):
            state = state_at(step + life, mesh)
            ckpt.save(step=step, state=state, host_state=iterator.at(step + life))
        finish(ckpt)
        world.meet()
    return found


def _away(world: JobProcess, name: str) -> None:
    """The hosts go, and others come in their place, whose ramdisks are empty."""
    world.meet()
    if world.process in AWAY:
        ramdisk = world.ramdisk(name)
        ramdisk.rename(f"{ramdisk}.away")
    world.meet()


def _back(world: JobProcess, name: str) -> None:
    """They return with what they held."""
    world.meet()
    if world.process in AWAY:
        ramdisk = world.ramdisk(name)
        shutil.rmtree(ramdisk)
        ramdisk.with_name(f"{ramdisk.name}.away").rename(ramdisk)
    world.meet()


def _found(world: JobProcess, name: str, **more: Any) -> dict[str, Any]:
    mesh = mesh_of(world.slices)
    iterator = Iterator(-1)
    world.events.clear()
    with world.config(name, mesh=mesh, local_keep_last_n=2, **more).instantiate() as ckpt:
        step, state = ckpt.restore(state=specs_on(mesh), host_state=iterator)
        report = ckpt.last_restore
        world.meet()
    assert step is not None
    assert report is not None
    return {
        "step": step,
        "tier": report.tier,
        "from_new": differences(state, step + NEW_LIFE, mesh) == [],
        "iterator_new": iterator.is_at(step + NEW_LIFE, world.process),
        "rejected": [[r.step, r.reason] for r in report.rejected],
    }


def _roll_back(world: JobProcess, name: str, last: int, **more: Any) -> int | None:
    _train(world, name, 10, OLD_LIFE, None, **more)
    _away(world, name)
    return _train(world, name, last, NEW_LIFE, 5, **more)


def same_step(world: JobProcess) -> Any:
    """Both timelines have a step 10, each whole in the RAM of one slice."""
    since = _roll_back(world, "same", 10)
    _back(world, "same")
    first = _found(world, "same")
    return [since, first, _found(world, "same")]


def newer_step_abandoned(world: JobProcess) -> Any:
    """The new timeline has come to step 8 only, saved by force; the old one has step 10."""
    mesh, iterator = mesh_of(world.slices), Iterator(world.process)
    _train(world, "newer", 10, OLD_LIFE, None)
    _away(world, "newer")
    with world.config("newer", mesh=mesh, local_keep_last_n=2).instantiate() as ckpt:
        since, _ = ckpt.restore(5, state=specs_on(mesh), host_state=iterator)
        state, place = state_at(8 + NEW_LIFE, mesh), iterator.at(8 + NEW_LIFE)
        ckpt.save(step=8, state=state, host_state=place, force=True)
        finish(ckpt)
        world.meet()
    _back(world, "newer")
    return [since, _found(world, "newer"), _found(world, "newer")]


def abandoned_out_of_reach(world: JobProcess) -> Any:
    """The hosts that return give nobody the manifests of the old timeline's newer step."""
    name = "out_of_reach"
    _train(world, name, 10, OLD_LIFE, None)
    _away(world, name)
    since = _train(world, name, 8, NEW_LIFE, 5, local_save_every=8)
    _back(world, name)
    answer = Session._answer

    def break_off(self: Session, request: wire.Request) -> None:
        if isinstance(request, wire.GetContents):
            raise ConnectionResetError("scripted")
        answer(self, request)

    if world.process in AWAY:
        Session._answer = break_off
    try:
        first = _found(world, name)
    finally:
        Session._answer = answer
    return [since, first, _found(world, name)]


def only_storage_has_the_new(world: JobProcess) -> Any:
    """All RAM of the new life is lost; storage has its step 10, the hosts that return the old."""
    storage = {"dir": str(world.root / "stored"), "save_every": 5}
    since = _roll_back(world, "stored_new", 10, **storage)
    _back(world, "stored_new")
    lose(world, "stored_new", 0, 1)
    first = _found(world, "stored_new", **storage)
    return [since, first, _found(world, "stored_new", **storage)]


if __name__ == "__main__":
    run_program(programs_of(globals()))
