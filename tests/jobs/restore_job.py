"""Restore scenarios, each on fresh ramdisk directories, all in one job of four real processes.

A lost host is an emptied directory; other process ids are other directories given to the processes.
Each program returns what its process saw; ``test_restore.py`` judges.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from job_process import (
    Iterator,
    JobProcess,
    Program,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)
from mounts import mount_tmpfs, unmount
from restoring import damage_newest, lose, newest_manifest, process_dir, restore, train

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.cluster.round import agree
from emergency_ckpt.errors import CheckpointError

Fault = Callable[[JobProcess, str], None]


def after(fault: Fault, **of_restore: Any) -> Program:
    """Train to step 10, let ``fault`` happen to the ramdisks, and restore."""

    def program(world: JobProcess) -> Any:
        train(world, world.program, range(1, 11))
        world.meet()
        fault(world, world.program)
        world.meet()
        return restore(world, world.program, **of_restore)

    return program


def lost(*hosts: int) -> Fault:
    return lambda world, name: lose(world, name, *hosts)


def damaged(*hosts: int) -> Fault:
    """The newest step has a damaged shard at each of ``hosts``."""

    def fault(world: JobProcess, name: str) -> None:
        if world.process in hosts:
            damage_newest(process_dir(world, name, world.process))

    return fault


def slice_lost(world: JobProcess) -> Any:
    first = after(lost(2, 3))(world)
    # The fetched copies count: now the other slice may go.
    lose(world, "slice_lost", 0, 1)
    return [first, restore(world, "slice_lost")]


def tensors_restored_after_a_loss(world: JobProcess) -> Any:
    """A slice restores tensors alone; then the other goes, and host states are wanted."""
    name = "tensors_restored_after_a_loss"
    first = after(lost(2, 3), wants_host_state=False)(world)
    lose(world, name, 0, 1)
    return [first, restore(world, name)]


def nothing_beside_tensors_after_losses(world: JobProcess) -> Any:
    """No process has a host state, and each restore wants one, after the loss of each slice."""
    name = "nothing_beside_tensors_after_losses"
    train(world, name, range(1, 11), saves_host_state=False)
    lose(world, name, 2, 3)
    first = restore(world, name)
    lose(world, name, 0, 1)
    return [first, restore(world, name)]


def slices_swapped(world: JobProcess) -> Any:
    return after(lost(), mesh=mesh_of(world.slices, [1, 0]))(world)


def mended_and_lost(world: JobProcess) -> Any:
    """A damaged shard is mended by a peer; then the peer goes, and the mended copy must do."""
    first = after(damaged(1))(world)
    lose(world, "mended_and_lost", 2, 3)
    return [first, restore(world, "mended_and_lost")]


class _OnlyForward(Iterator):
    """It takes the state of any batch, and not the one that it had before the first."""

    def set_state(self, state: bytes) -> None:
        if state == Iterator(-1).get_state():
            raise ValueError("no batch was drawn yet")
        super().set_state(state)


def iterator_not_set_back(world: JobProcess) -> Any:
    """Two processes have set their iterators when the others find the step damaged."""
    return after(damaged(0, 2), iterator=_OnlyForward(-1))(world)


class _Unready(Iterator):
    def get_state(self) -> bytes:
        raise ValueError("no data set is open")


def part_not_begun(world: JobProcess) -> Any:
    """Each restore cannot begin on some process, for a reason of its own; then one can on all.

    Then steps are announced, until all processes have completed a save.
    """
    name, mesh, me = "part_not_begun", mesh_of(world.slices), world.process
    train(world, name, range(1, 11))
    state, iterator = specs_on(mesh), Iterator(-1)
    seen: list[Any] = []
    every = datetime.timedelta(seconds=0.1)
    with world.config(name, mesh=mesh, local_save_every=every).instantiate() as ckpt:
        for state_here, iterator_here, step in (
            (state | {"w": object()} if me == 0 else state, iterator, None),
            (state, _Unready(-1) if me == 2 else iterator, None),
            (state, iterator, -1 if me == 1 else None),
            (state, iterator, -1),
        ):
            try:
                ckpt.restore(step, state=state_here, host_state=iterator_here)
            except CheckpointError as error:
                seen.append([type(error).__name__, str(error)])
            world.meet()
        seen.append(ckpt.restore(state=state, host_state=iterator)[0])
        seen.append(_train_until_saved(world, ckpt, mesh, iterator))
    return seen


def _train_until_saved(
    world: JobProcess, ckpt: EmergencyCheckpointer, mesh: Mesh, iterator: Iterator
) -> bool:
    """Step until each process has seen a save complete; return whether all did."""
    state = state_at(11, mesh)
    for turn in range(20):
        for step in range(11 + 20 * turn, 31 + 20 * turn):
            time.sleep(0.01)
            ckpt.save(step=step, state=state, host_state=iterator)
        ckpt.wait_until_finished()
        lacks = "" if world.named("save.complete") else "no save is complete"
        if not agree(world.meeting, f"{world.program}/saved/{turn}", lacks, 60.0):
            return True
    return False


def truncate_manifest(world: JobProcess, name: str) -> None:
    if world.process == 2:
        path = newest_manifest(process_dir(world, name, 2))
        path.write_bytes(path.read_bytes()[:-40])


def remove_manifests(world: JobProcess, name: str) -> None:
    """Both holders of one part lose the newest manifest: the older step is whole."""
    if world.process in (1, 3):
        newest_manifest(process_dir(world, name, world.process)).unlink()


def remove_host_state(world: JobProcess, name: str) -> None:
    """Tensors of step 10 are whole, the host state of process 1 is held nowhere."""
    held = process_dir(world, name, world.process)
    for path in held.glob("host_state/*-10/process_00001_of_*.json"):
        path.unlink()


def keep_one_step_each(world: JobProcess, name: str) -> None:
    """Slice 0 holds step 10 alone, slice 1 step 5 alone: 10 is whole, and newer."""
    directory = process_dir(world, name, world.process)
    newest = newest_manifest(directory)
    if world.process in (2, 3):
        newest.unlink()
    else:
        for path in directory.glob("slot_*.manifest.json"):
            if path != newest:
                path.unlink()


def two_incarnations(world: JobProcess) -> Any:
    """Step 10 by one half of the processes in one life, by the other half in the next."""
    name = "lives"
    train(world, name, range(1, 6))
    for half in ((0, 2), (1, 3)):
        mesh = mesh_of(world.slices)
        iterator = Iterator(world.process)
        with world.config(name, save_timeout_s=1.5).instantiate() as ckpt:
            restored, _ = ckpt.restore(state=specs_on(mesh), host_state=iterator)
            assert restored == 5, restored
            if world.process in half:
                ckpt.save(step=10, state=state_at(10, mesh), host_state=iterator.at(10))
                ckpt.wait_until_finished()
            world.meet()
            # Undo what the next restore does to newer leftovers, to have both halves on disk.
        keep_leftovers(world, name, world.process in half)
    put_back_leftovers(world, name)
    return restore(world, name)


def keep_leftovers(world: JobProcess, name: str, mine: bool) -> None:
    world.meet()
    if mine:
        directory = process_dir(world, name, world.process)
        aside = world.root / f"aside_{world.process}"
        shutil.copytree(directory, aside)
    world.meet()


def put_back_leftovers(world: JobProcess, name: str) -> None:
    directory = process_dir(world, name, world.process)
    shutil.rmtree(directory)
    shutil.copytree(world.root / f"aside_{world.process}", directory)
    world.meet()


def other_mesh(world: JobProcess) -> Any:
    """Saved on (2, 2), restored on one slice of four hosts: boxes intersect."""
    return after(lost(), mesh=mesh_of(1))(world)


def other_mesh_after_loss(world: JobProcess) -> Any:
    return after(lost(1, 2), mesh=mesh_of(1))(world)


def other_places_beside_full_ramdisks(world: JobProcess) -> Any:
    """Both processes that now need one half have no room; only the old slot of another has it."""
    name, full = "other_places_beside_full_ramdisks", (1, 2)
    train(world, name, range(1, 11))
    lose(world, name, *full)
    ramdisk = world.ramdisk(name)
    if world.process in full:
        ramdisk.mkdir(mode=0o700)
        if not mount_tmpfs(ramdisk, 8 << 10):  # two pages: a slot and its records need more
            ramdisk.rmdir()
    world.meet()
    if not all(world.ramdisk(name, host).exists() for host in full):
        return None
    mesh = Mesh(np.array(jax.devices())[[1, 0, 2, 3]].reshape(2, 2), ("slice", "fsdp"))
    try:
        return [restore(world, name, mesh=mesh) for _ in range(2)]
    finally:
        world.meet()
        if world.process in full:
            unmount(ramdisk)


def more_lost_than_copies(world: JobProcess) -> Any:
    directory = str(world.root / "persistent_copies")
    settings = {"dir": directory, "save_every": 5}
    train(world, "deep", range(1, 8), **settings)
    lose(world, "deep", 0, 2)
    return restore(world, "deep", **settings)


def requested_step(world: JobProcess) -> Any:
    train(world, "requested", range(1, 11))
    seen = [restore(world, "requested", requested=5), restore(world, "requested")]
    train(world, "requested", range(6, 8), since=5, local_save_every=7)
    # Step 10 is newer than what training went on from: it is gone, whatever was on the disks.
    return [*seen, restore(world, "requested"), restore(world, "requested", requested=10)]


def other_steps(world: JobProcess) -> Any:
    """Each process asks for the step that it calls the newest; then all for that of one."""
    train(world, "other_steps", range(1, 11))
    first = restore(world, "other_steps", requested=10 if world.process == 2 else 5)
    newest = restore(world, "other_steps", requested=None if world.process == 2 else 5)
    return [first, newest, restore(world, "other_steps", requested=10)]


def another_run(world: JobProcess) -> Any:
    """A run neither restores nor removes what a run that crashed left on the same ramdisk."""
    train(world, "old", range(1, 11))
    shared = str(world.ramdisk("old"))
    world.meet()
    meanwhile = restore(world, "new", local_dir=shared)
    world.meet()
    return {"beside": meanwhile, "then": restore(world, "old")}


def refused_start(world: JobProcess, name: str, **settings: Any) -> dict[str, str]:
    try:
        world.config(name, **settings).instantiate()
    except CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error)}
    raise AssertionError("the fault was not seen")


def one_ramdisk_unusable(world: JobProcess) -> Any:
    """The ramdisk of one process is a file: every process gets an error, nobody waits."""
    settings: dict[str, Any] = {}
    if world.process == 1:
        path = world.root / "not_a_directory"
        path.write_text("")
        settings = {"local_dir": str(path)}
    return refused_start(world, "unusable", **settings)


PROGRAMS = programs_of(globals()) | {
    "nothing_lost": after(lost()),
    "corrupt_shard": after(damaged(1)),
    "corrupt_everywhere": after(damaged(0, 1, 2, 3)),
    "truncated_manifest": after(truncate_manifest),
    "missing_manifest_everywhere": after(remove_manifests),
    "host_state_missing": after(remove_host_state),
    "two_steps_on_different_hosts": after(keep_one_step_each),
    "unrecoverable": after(lost(0, 2)),
}

if __name__ == "__main__":
    run_program(PROGRAMS)
