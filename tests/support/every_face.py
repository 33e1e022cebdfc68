"""The native class and each face of Orbax by one name for each call, in a world of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from orbax_faces import FACES, target
from world import World

from emergency_ckpt import orbax as emergency

KINDS = ["native", "emergency", *FACES]


class Native:
    """``EmergencyCheckpointer`` with the calls of ``orbax_faces``."""

    def __init__(self, world: World, settings: Mapping[str, Any]) -> None:
        self.own = world.open_both(save_every=100, **settings)

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        return self.own.save(step=step, state=state, force=force)

    def load(self, step: int | None, target: Any) -> Any:
        return self.own.restore(step, state=target)[1]

    def latest(self) -> int | None:
        return self.own.latest_step()

    def wait(self) -> None:
        self.own.wait_until_finished()

    def close(self) -> None:
        self.own.stop()


class Emergency:
    """The face of Orbax's emergency manager."""

    def __init__(self, world: World, settings: Mapping[str, Any]) -> None:
        world.ramdisk.mkdir(exist_ok=True)
        local = emergency.LocalCheckpointOptions(save_interval_steps=1)
        options = emergency.CheckpointManagerOptions(local=local, settings=settings)
        places = (world.ramdisk, world.persistent, world.mesh, target(world))
        self.own = emergency.CheckpointManager(*places, options=options)

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        return self.own.save(step, args, force=force)

    def load(self, step: int | None, target: Any) -> Any:
        del target
        return self.own.restore(step).state

    def latest(self) -> int | None:
        return self.own.latest_step()

    def close(self) -> None:
        self.own.close()

    def wait(self) -> None:
        self.own.wait_until_finished()


def opener(kind: str, world: World, **settings: Any) -> Callable[[], Any]:
    """Return what opens the face: one that saves each step to RAM, and of storage the first."""

    def opened() -> Any:
        if kind == "native":
            return Native(world, settings)
        if kind == "emergency":
            return Emergency(world, settings)
        own = {"local_save_every": 1, "mesh": world.mesh, "on_event": world.events.append}
        return FACES[kind](world.persistent, 100, ram=world.ramdisk, settings=own | settings)

    return opened
