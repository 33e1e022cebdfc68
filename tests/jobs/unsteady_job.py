"""Restores from peers whose connections break or hang; ``test_unsteady_peers.py`` judges."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, finish, mesh_of, programs_of, run_program
from restoring import lose, process_dir, restore, train

from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.server import Session

STEPS = range(1, 11)
_RESETS = 3
_SILENCE_S = 3.0


@contextlib.contextmanager
def answering(fault: Callable[[wire.Request], None]) -> Iterator[None]:
    """Route the shards that this process serves through ``fault``."""
    answer = Session._answer

    def through_fault(self: Session, request: wire.Request) -> None:
        fault(request)
        answer(self, request)

    Session._answer = through_fault
    try:
        yield
    finally:
        Session._answer = answer


def resetting(times: float = _RESETS) -> Callable[[wire.Request], None]:
    """The connections of the first requests of each kind break before the answer."""
    seen: Counter[type] = Counter()

    def fault(request: wire.Request) -> None:
        seen[type(request)] += 1
        if seen[type(request)] <= times:
            raise ConnectionResetError("scripted")

    return fault


def lose_all(world: JobProcess, name: str) -> None:
    world.meet()
    if world.process == 0:
        shutil.rmtree(world.root / name)
    world.meet()


def resets(world: JobProcess) -> Any:
    """The only holders of slice 1's shards, host states and manifests reset connections."""
    train(world, "resets", STEPS)
    lose(world, "resets", 2, 3)
    with answering(resetting()):
        return restore(world, "resets")


def silence(world: JobProcess) -> Any:
    """The only holder says nothing for longer than the longest silence, once."""
    train(world, "silence", STEPS)
    lose(world, "silence", 2, 3)
    hung = threading.Event()
    first: list[wire.Request] = []

    def fault(request: wire.Request) -> None:
        if isinstance(request, wire.GetShards) and not first:
            first.append(request)
            hung.wait(_SILENCE_S)

    with answering(fault):
        return restore(world, "silence", transfer_timeout_s=1.0)


def refusal(world: JobProcess) -> Any:
    """Nobody gets shards from the only holder until the deadline; then all is well again."""
    train(world, "refusal", STEPS)
    lose(world, "refusal", 2, 3)
    with answering(resetting(times=float("inf"))):
        refused = restore(world, "refusal", total_timeout_s=4.0)
    return [refused, restore(world, "refusal")]


def loaded(world: JobProcess) -> Any:
    """Hand round a load from storage over connections that break."""
    settings = {"dir": str(world.root / "loaded_steps"), "save_every": 5}
    train(world, "loaded", STEPS, **settings)
    lose_all(world, "loaded")
    with answering(resetting()):
        seen = restore(world, "loaded", **settings)
    return {**seen, "loads": [event["step"] for event in world.named("restore.stage.loaded")]}


def small_state(step: int, mesh: Any) -> dict[str, Any]:
    """Two MiB on each process: so many that a third slot of them is not at hand."""
    value = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024) + step
    sharding = NamedSharding(mesh, P("fsdp"))
    return {"w": jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])}


def small_ramdisk(world: JobProcess) -> Any:
    """Room for two slots, both damaged everywhere: loaded, handed round, and saved again."""
    mesh = mesh_of(world.slices)
    settings = {
        "mesh": mesh,
        "dir": str(world.root / "small_steps"),
        "save_every": 5,
        "local_keep_last_n": 1,
    }
    with world.config("small", **settings).instantiate() as ckpt:
        ckpt.restore(state=small_state(0, mesh))
        for step in STEPS:
            ckpt.save(step=step, state=small_state(step, mesh))
        finish(ckpt)
    world.meet()
    for path in process_dir(world, "small", world.process).glob("slot_*.bin"):
        with path.open("r+b") as file:
            file.write(b"\xff")
    world.meet()
    with world.config("small", **settings).instantiate() as ckpt:
        step, state = ckpt.restore(state=small_state(0, mesh))
        wanted = small_state(10, mesh)["w"].addressable_shards[0].data
        same = np.array_equal(state["w"].addressable_shards[0].data, wanted)
        del state
        gc.collect()
        for later in range(11, 21):
            ckpt.save(step=later, state=small_state(later, mesh))
        finish(ckpt)
        return {"step": step, "same": same, "loads": len(world.named("restore.stage.loaded"))}


if __name__ == "__main__":
    run_program(programs_of(globals()))
