"""Checkpointers that choose the axis of the slices: four processes of two devices."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, run_program

from emergency_ckpt.events import Event
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.maxtext import create_checkpoint_manager
from emergency_ckpt.tools.cli.ls.survives import report_survival
from emergency_ckpt.tools.survey.places import Places

HOSTS = range(4)
FIRST, SECOND = (0, 1), (2, 3)
MAXTEXT_AXES = (
    *("diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses"),
    *("context_autoregressive", "tensor", "tensor_sequence", "expert", "autoregressive"),
)
"""As in ``mesh_axes`` of MaxText's base.yml."""


def mesh_of(**sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))


def maxtext_mesh(**sizes: int) -> Mesh:
    return mesh_of(**{name: sizes.get(name, 1) for name in MAXTEXT_AXES})


def inside_first() -> Mesh:
    """The first axis is of the devices of each host."""
    return Mesh(np.array(jax.devices()).reshape(4, 2).T, ("inside", "data"))


def state_at(step: int, mesh: Mesh, specs: dict[str, P]) -> dict[str, jax.Array]:
    """A leaf of 64 bytes for each of ``specs``."""

    def leaf(spec: P) -> jax.Array:
        whole = np.arange(16, dtype=np.float32) + step
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback((16,), sharding, lambda index: whole[index])

    return {name: leaf(spec) for name, spec in specs.items()}


def is_right(state: dict[str, jax.Array], step: int) -> bool:
    whole = np.arange(16, dtype=np.float32) + step
    return all(
        np.array_equal(np.asarray(shard.data), whole[shard.index])
        for array in state.values()
        for shard in array.addressable_shards
    )


def lose(world: JobProcess, name: str, hosts: tuple[int, ...]) -> None:
    world.meet()
    if world.process in hosts:
        shutil.rmtree(world.ramdisk(name))
    world.meet()


def survival(world: JobProcess, name: str) -> Any:
    """The copies of each part, by hosts, and the slices whose loss costs nothing."""
    world.meet()
    dirs = tuple(world.ramdisk(name, host) for host in HOSTS)
    report = report_survival(Places(local_dirs=dirs), ())
    world.meet()
    outlived = [
        each.name for each in report.losses if each.what == "slice" and each.steps_lost == 0
    ]
    return [{str(k): v for k, v in report.shards.items()}, outlived]


def chosen(
    name: str,
    mesh_by: Callable[[], Mesh],
    specs: dict[str, P],
    lost: tuple[int, ...] = (),
    **settings: Any,
) -> Callable[[JobProcess], Any]:
    """What a start says of slices and copies, and the step that is left after hosts are lost."""

    def program(world: JobProcess) -> Any:
        mesh = mesh_by()
        if settings.get("save_every"):
            settings["dir"] = str(world.root / f"{name}_storage")
        events: list[Event] = []
        config = world.config(
            name, mesh=mesh, local_save_every=1, on_event=events.append, **settings
        )
        with config.instantiate() as ckpt:
            for step in (1, 2):
                ckpt.save(step=step, state=state_at(step, mesh, specs), host_state={"at": step})
                ckpt.wait_until_finished()
            ckpt.check_for_errors()
        (ready,) = [event.fields for event in events if event.name == "start.ready"]
        single = [e.fields["single_bytes"] for e in events if e.point == "warning.single_copy"]
        of_saves = {e.origin.slice_index for e in events if e.point == "save.stage.published"}
        found = {
            "slices": ready["slices"],
            "single_bytes": single,
            "slice": sorted(map(str, of_saves)),
            "survival": survival(world, name),
        }
        lose(world, name, lost)
        with config.instantiate() as ckpt:
            like = state_at(0, mesh, specs)
            step, state = ckpt.restore(state=like, host_state={"at": 0})
            found["restored"] = [step, step is not None and is_right(state, step)]
        return found

    return program


def maxtext(name: str, mesh_by: Callable[[], Mesh], spec: P, **settings: Any) -> Any:
    """MaxText's manager: the steps, the copies, and a restore without a slice and storage."""

    def program(world: JobProcess) -> Any:
        mesh, specs = mesh_by(), {"w": spec}
        place, storage = world.ramdisk(name), world.root / f"{name}_storage"
        place.parent.mkdir(parents=True, exist_ok=True)
        flags = {
            "local_checkpoint_directory": str(place),
            "checkpoint_dir": str(storage),
            "local_checkpoint_period": 1,
            "checkpoint_period": 50,
        }
        manager = create_checkpoint_manager(flags, mesh, state_at(0, mesh, specs), **settings)
        assert manager is not None
        with manager:
            for step in (0, 1, 2):
                args = ocp.args.PyTreeSave(state_at(step, mesh, specs))
                manager.save(step, ocp.args.Composite(state=args))
                manager.wait_until_finished()
            steps = manager.all_steps(read=True)
        if steps == [0]:
            return {"steps": steps}
        found = {"steps": steps, "survival": survival(world, name)}
        if mesh.shape["data"] > 1:
            lose(world, name, SECOND)
            if world.process == 0:
                shutil.rmtree(storage)
            world.meet()
        place.mkdir(mode=0o700, exist_ok=True)
        manager = create_checkpoint_manager(flags, mesh, state_at(0, mesh, specs), **settings)
        assert manager is not None
        with manager:
            found["restored"] = is_right(manager.restore(2).state, 2)
        return found

    return program


def size_1_named(world: JobProcess) -> Any:
    """A replica_axis of size 1: each tensor has copies on all hosts, a host state has one."""
    mesh, specs, lines = mesh_of(slice=8, fsdp=1), {"w": P()}, list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("absl").addHandler(handler)
    config = world.config(
        "size_1_named",
        mesh=mesh,
        replica_axis="fsdp",
        local_save_every=1,
        dir=str(world.root / "size_1_named_storage"),
        save_every=1000,
    )
    with config.instantiate() as ckpt:
        for step in (4, 6):
            state = state_at(step, mesh, specs)
            ckpt.save(step=step, state=state, host_state={"at": step}, force=step == 4)
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
    single = [line for line in lines if "one copy in RAM" in line]
    lose(world, "size_1_named", (3,))
    lines.clear()
    with config.instantiate() as ckpt:
        step, _ = ckpt.restore(state=state_at(0, mesh, specs), host_state={"at": 0})
    logging.getLogger("absl").removeHandler(handler)
    passed = [line for line in lines if "passed over" in line]
    return {"single": single, "restored": step, "passed": passed}


TWO_COPIES = Striped(2, everywhere_below_bytes=0)
BY_FSDP = {"a": P("fsdp"), "b": P()}
PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    "size 1 first": chosen(
        "size_1", lambda: mesh_of(diloco=1, data=2, fsdp=4), BY_FSDP, lost=SECOND
    ),
    "size 1 named": size_1_named,
    "split first": chosen("split_first", lambda: mesh_of(fsdp=2, data=4), BY_FSDP, lost=(0, 2)),
    "inside first": chosen("inside_first", inside_first, {"a": P("inside")}, lost=(1, 3)),
    "one leaf on every axis": chosen(
        "every_axis",
        lambda: mesh_of(data=2, fsdp=4),
        {**BY_FSDP, "all": P(("data", "fsdp"))},
        placement=TWO_COPIES,
    ),
    "one leaf on every axis, stored": chosen(
        "every_axis_stored",
        lambda: mesh_of(data=2, fsdp=4),
        {**BY_FSDP, "all": P(("data", "fsdp"))},
        lost=FIRST,
        save_every=1,
    ),
    "more bytes along the second": chosen(
        "more_bytes",
        lambda: mesh_of(first=2, second=4),
        {"a": P("first"), "b": P("first"), "c": P("second")},
        placement=TWO_COPIES,
    ),
    "MaxText": maxtext("maxtext", lambda: maxtext_mesh(data=2, fsdp=4), P("fsdp")),
    "MaxText without replicas": maxtext("maxtext_one", lambda: maxtext_mesh(fsdp=8), P("fsdp")),
    "MaxText without replicas, in RAM": maxtext(
        "maxtext_one_ram",
        lambda: maxtext_mesh(fsdp=8),
        P("fsdp"),
        local_save_every=1,
    ),
    "manager of a mesh of one axis": maxtext("one_axis", lambda: mesh_of(data=8), P()),
}

if __name__ == "__main__":
    run_program(PROGRAMS)
