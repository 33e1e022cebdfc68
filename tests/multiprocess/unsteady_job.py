"""Restores from peers whose connections break or hang; ``test_unsteady_peers.py`` judges."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from restoring import lose, restore, train
from world import World, run_program

from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.session import Session

STEPS = range(1, 11)
_RESETS = 3
_SILENCE_S = 3.0


@contextlib.contextmanager
def answering(fault: Callable[[wire.Request], None]) -> Iterator[None]:
    """What this process serves goes through ``fault`` first."""
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


def lose_all(world: World, name: str) -> None:
    world.meet()
    if world.process == 0:
        shutil.rmtree(world.root / name)
    world.meet()


def resets(world: World) -> Any:
    """The only holders of slice 1's shards, host states and manifests reset connections."""
    train(world, "resets", STEPS)
    lose(world, "resets", 2, 3)
    with answering(resetting()):
        return restore(world, "resets")


def silence(world: World) -> Any:
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


def refusal(world: World) -> Any:
    """Nobody gets shards from the only holder until the deadline; then all is well again."""
    train(world, "refusal", STEPS)
    lose(world, "refusal", 2, 3)
    with answering(resetting(times=float("inf"))):
        refused = restore(world, "refusal", restore_timeout_s=4.0)
    return [refused, restore(world, "refusal")]


def loaded(world: World) -> Any:
    """What was loaded from storage is handed round over connections that break."""
    settings = {"dir": str(world.root / "loaded_steps"), "save_every_n_steps": 5}
    train(world, "loaded", STEPS, **settings)
    lose_all(world, "loaded")
    with answering(resetting()):
        seen = restore(world, "loaded", **settings)
    return {**seen, "loads": [event["step"] for event in world.named("restore.loaded")]}


PROGRAMS = {program.__name__: program for program in (resets, silence, refusal, loaded)}

if __name__ == "__main__":
    run_program(PROGRAMS)
