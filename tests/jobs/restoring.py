"""What jobs that lose ramdisks do on each process: train, lose, restore and compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from damage import flip
from job_process import Iterator, JobProcess, differences, finish, mesh_of, specs_on, state_at

from emergency_ckpt.errors import CheckpointError


def train(
    world: JobProcess, name: str, steps: range, *, since: int | None = None, **settings: Any
) -> None:
    """Save at every step that is due, and stop; ``since``: go on from this older step.

    ``saves_host_state``: False to save and restore tensors alone.
    """
    mesh = settings.setdefault("mesh", mesh_of(world.slices))
    iterator = Iterator(world.process) if settings.pop("saves_host_state", True) else None
    with world.config(name, **settings).instantiate() as ckpt:
        ckpt.restore(since, state=specs_on(mesh), host_state=iterator)
        for step in steps:
            host_state = iterator and iterator.at(step)
            ckpt.save(step=step, state=state_at(step, mesh), host_state=host_state)
        finish(ckpt)
        world.meet()


def restore(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    """Restore in a fresh checkpointer and compare every bit.

    ``requested``, ``iterator``: the step, and another iterator than a new one.
    ``wants_host_state``: False to restore tensors alone.
    """
    mesh = settings.setdefault("mesh", mesh_of(world.slices))
    requested = settings.pop("requested", None)
    iterator = settings.pop("iterator", None) or Iterator(-1)
    host_state = iterator if settings.pop("wants_host_state", True) else None
    world.events.clear()
    try:
        with world.config(name, **settings).instantiate() as ckpt:
            step, state = ckpt.restore(requested, state=specs_on(mesh), host_state=host_state)
            report = ckpt.last_restore
            world.meet()
    except CheckpointError as error:
        world.meet()
        return {"error": type(error).__name__, "text": str(error)}
    if step is None:
        return {"step": None, "untouched": iterator.process == -1}
    assert report is not None
    return {
        "step": step,
        "tier": report.tier,
        "differences": differences(state, step, mesh),
        "iterator": [iterator.process, iterator.position],
        "iterator_right": iterator.is_at(step, world.process),
        "local": report.bytes_local,
        "peer": report.bytes_peer,
        "persistent": report.bytes_persistent,
        "rejected": [[r.step, r.reason] for r in report.rejected],
        "quarantined": world.named("restore.quarantined"),
    }


def lose(world: JobProcess, name: str, *hosts: int) -> None:
    """The ramdisks of ``hosts`` come back empty."""
    world.meet()
    if world.process == 0:
        for host in hosts:
            shutil.rmtree(world.ramdisk(name, host))
    world.meet()


def process_dir(world: JobProcess, name: str, host: int) -> Path:
    (found,) = (world.ramdisk(name, host) / name).glob("process_*")
    return found


def newest_manifest(directory: Path) -> Path:
    return max(directory.glob("slot_*.manifest.json"), key=lambda path: path.stat().st_mtime_ns)


def damage_newest(directory: Path) -> None:
    """Flip one bit in the first byte of the newest slot of a process directory."""
    slot = newest_manifest(directory).name.split(".")[0]
    flip(directory / f"{slot}.bin", 0)
