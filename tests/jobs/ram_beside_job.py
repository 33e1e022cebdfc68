"""Both faces of plain Orbax in a job: processes without a RAM tier, and lost RAM."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, finish, mesh_of, run_program
from orbax_faces import FACES, Position, Positioned, no_state

from emergency_ckpt.errors import ConfigError, RamdiskFull
from emergency_ckpt.ram.tier import LocalTier

WITHOUT_ROOM = 1


def state_at(step: int, slices: int) -> dict[str, Any]:
    mesh = mesh_of(slices)

    def put(value: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {
        "w": put(np.arange(32, dtype=np.float32).reshape(8, 4) + step, "fsdp"),
        "step": put(np.array(step, np.int32)),
    }


def opened(world: JobProcess, kind: str, name: str, stores: int = 2, **more: Any) -> Any:
    settings = {
        "local_save_every": 1,
        "mesh": mesh_of(world.slices),
        "stall_timeout_s": 30.0,
        "on_event": lambda event: world.events.append((event.name, dict(event.fields))),
        **more,
    }
    directory = world.root / f"{name}_{kind}"
    return FACES[kind](
        directory, stores, ram=world.ramdisk(f"ram_{name}_{kind}"), settings=settings
    )


def load(face: Any, step: int | None, world: JobProcess) -> int:
    """Load a step; return which one it was."""
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        state_at(0, world.slices),
    )
    found = face.load(step, like)
    number = int(found["step"])
    right = state_at(number, world.slices)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        for a, b in zip(mine.addressable_shards, wanted.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    return number


def given_up(world: JobProcess) -> list[str]:
    return [fields["operation"] for fields in world.named("ram.off.given_up")]


def full_at_one(kind: str, *, loads_at_once: bool) -> Callable[[JobProcess], Any]:
    """One process has no room in its ramdisk: nobody has a RAM tier, and storage goes on."""

    def program(world: JobProcess) -> Any:
        check = LocalTier.check_reservable

        def full(tier: LocalTier, slot_bytes: int) -> None:
            raise RamdiskFull("reserve", "slots", f"{slot_bytes} bytes have no room")

        if world.process == WITHOUT_ROOM:
            LocalTier.check_reservable = full
        try:
            with opened(world, kind, f"full_{loads_at_once}") as face:
                face.save(0, state_at(0, world.slices))
                first = load(face, None, world) if loads_at_once else 0
                for step in range(1, 6):
                    face.save(step, state_at(step, world.slices))
                    face.wait()
                found = [face.stored(), face.latest(), first, load(face, None, world)]
        finally:
            LocalTier.check_reservable = check
        return [*found, len(given_up(world))]

    return program


def refused_at_one(kind: str) -> Callable[[JobProcess], Any]:
    """One process cannot open its ramdisk at the start."""

    def program(world: JobProcess) -> Any:
        ram = world.ramdisk(f"ram_refused_{kind}")
        if world.process == WITHOUT_ROOM:
            ram.parent.mkdir(parents=True, exist_ok=True)
            ram.write_text("no directory")
        with opened(world, kind, "refused") as face:
            for step in range(4):
                face.save(step, state_at(step, world.slices))
            face.wait()
            return [face.stored(), face.latest(), load(face, None, world), given_up(world)]

    return program


def wrong_at_one(kind: str) -> Callable[[JobProcess], Any]:
    """One process has a setting that is wrong, and ends; the others learn of it."""

    def program(world: JobProcess) -> Any:
        wrong = {"stall_timeout_s": -1.0} if world.process == WITHOUT_ROOM else {}
        try:
            opened(world, kind, "wrong", **wrong)
        except ConfigError as error:
            return str(error)
        return [fields["reason"] for fields in world.named("ram.off.given_up")]

    return program


def left_out_at_one(kind: str, process: int, data: Any) -> Callable[[JobProcess], Any]:
    """One process cannot save ``data`` of one step to RAM; the processes go on in step."""

    def program(world: JobProcess) -> Any:
        newest: list[int] = []
        is_odd = world.process == process
        name = f"left_out_{process}_{type(data).__name__}"
        with opened(world, kind, name, 100) as face:
            for step in range(4):
                right = Position(step)
                face.save(
                    step, state_at(step, world.slices), data if is_odd and step == 2 else right
                )
                face.wait()
                newest.append(face.latest())
                world.meet()
        named = world.named("save.skipped.unfit" if is_odd else "save.incomplete")
        reasons = [fields["reason"] for fields in named]
        with opened(world, kind, name, 100) as face:
            return [newest, face.latest(), load(face, 3, world), given_up(world), reasons]

    return program


def lost_ram(kind: str, victims: tuple[int, ...]) -> Callable[[JobProcess], Any]:
    """The victims have lost their RAM between two lives; then the loop goes on."""

    def program(world: JobProcess) -> Any:
        name = f"lost_{'_'.join(map(str, victims))}"
        with opened(world, kind, name, 4) as face:
            for step in range(7):
                face.save(step, state_at(step, world.slices))
            face.wait()
        world.meet()
        if world.process in victims:
            shutil.rmtree(world.ramdisk(f"ram_{name}_{kind}"))
        world.meet()
        with opened(world, kind, name, 4) as face:
            found = [face.latest(), load(face, face.latest(), world)]
            face.save(7, state_at(7, world.slices))
            face.wait()
            return [*found, face.latest(), face.stored(), given_up(world)]

    return program


def rolled_back(kind: str) -> Callable[[JobProcess], Any]:
    """The loop goes back to a step of storage; RAM's newer steps are gone with the next save."""

    def program(world: JobProcess) -> Any:
        with opened(world, kind, "back", 100) as face:
            for step in range(6):
                face.save(step, state_at(step, world.slices))
            face.wait()
            found = [face.latest(), load(face, 0, world)]
            for step in (1, 2):
                face.save(step, state_at(step, world.slices))
            face.wait()
            found.append(face.latest())
        world.meet()
        with opened(world, kind, "back", 100) as face:
            return [*found, face.latest(), load(face, None, world)]

    return program


def dropped(kind: str) -> Callable[[JobProcess], Any]:
    """Two managers restore, one after the other, and nobody closes them."""

    def program(world: JobProcess) -> Any:
        with opened(world, kind, "dropped", 100) as face:
            for step in range(4):
                face.save(step, state_at(step, world.slices))
            face.wait()
        world.meet()
        found = [load(opened(world, kind, "dropped", 100), 3, world) for _ in range(2)]
        return [*found, given_up(world)]

    return program


def two_at_once(kind: str) -> Callable[[JobProcess], Any]:
    """Two managers are in use at once."""

    def program(world: JobProcess) -> Any:
        with (
            opened(world, kind, "two", 100) as first,
            opened(world, kind, "two", 100) as second,
        ):
            for step in range(2):
                first.save(step, state_at(step, world.slices))
                first.wait()
            second.reload()
            found = [load(first, 1, world), load(second, 0, world)]
            return [*found, first.latest(), second.latest(), given_up(world)]

    return program


def evaluated(world: JobProcess) -> Any:
    """Evaluators of all processes read beside the processes that train."""
    settings = {"dir": str(world.root / "stored"), "mesh": mesh_of(world.slices)}
    found: list[Any] = []
    with world.config("evaluated", local_save_every=1, save_every=2, **settings).instantiate() as t:
        for newest in (3, 5):
            for step in (newest - 1, newest):
                t.save(step=step, state=state_at(step, world.slices), host_state={"at": step})
                finish(t)
            world.meet()
            off = {"local_save_every": 0, "save_every": 0}
            with world.config("evaluated", **settings, **off).instantiate() as evaluator:
                host_state: dict[str, int] = {}
                step, state = evaluator.restore(
                    state=state_at(0, world.slices), host_state=host_state
                )
                found += [step, int(state["step"]), host_state["at"], evaluator.all_steps()]
        found.append(t.restore(5, state=state_at(0, world.slices))[0])
    return [
        *found,
        len(world.named("ram.off.full")),
    ]


PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    name: program
    for kind in FACES
    for name, program in {
        f"full, {kind}": full_at_one(kind, loads_at_once=False),
        f"full and load, {kind}": full_at_one(kind, loads_at_once=True),
        f"refused, {kind}": refused_at_one(kind),
        f"wrong, {kind}": wrong_at_one(kind),
        f"left out at 0, {kind}": left_out_at_one(kind, 0, Position(2, no_state)),
        f"left out at 1, {kind}": left_out_at_one(kind, 1, Position(2, no_state)),
        f"unfit at 1, {kind}": left_out_at_one(kind, 1, Positioned()),
        f"one lost, {kind}": lost_ram(kind, (1,)),
        f"slice lost, {kind}": lost_ram(kind, (0, 1)),
        f"both copies lost, {kind}": lost_ram(kind, (1, 3)),
        f"rolled back, {kind}": rolled_back(kind),
        f"dropped, {kind}": dropped(kind),
        f"two at once, {kind}": two_at_once(kind),
    }.items()
}
PROGRAMS["evaluated"] = evaluated

if __name__ == "__main__":
    run_program(PROGRAMS)
