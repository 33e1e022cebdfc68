"""Counts what the training thread calls while it saves, on two real processes."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax._src import distributed
from job_process import Iterator, JobProcess, finish, mesh_of, run_program, specs_on, state_at

from emergency_ckpt.transfer import TransferClient

STEPS = range(1, 21)
SETTINGS = {"local_save_every": 5, "save_every": 10}


class Calls:
    """Calls by thread; every name is counted."""

    def __init__(self) -> None:
        self.made: Counter[tuple[int, str]] = Counter()

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.made[threading.get_ident(), name] += 1
            return call(*args, **kwargs)

        return counting

    def here(self) -> dict[str, int]:
        me = threading.get_ident()
        made = list(self.made.items())  # other threads go on
        return {name: count for (thread, name), count in made if thread == me}

    def elsewhere(self) -> int:
        me = threading.get_ident()
        return sum(count for (thread, _), count in list(self.made.items()) if thread != me)


class CountingClient:
    """JAX's coordination client, with every call counted."""

    def __init__(self, client: Any, calls: Calls) -> None:
        self._client = client
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._calls.counted(name, found) if callable(found) else found


class Watch:
    """Modules whose functions, Python's or C's, this thread enters inside of the ``with``."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __enter__(self) -> Watch:
        gc.disable()  # JAX has a callback of its own in each collection
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not Watch.__exit__.__code__:
            self.modules.add(frame.f_globals.get("__name__", "?"))
        elif event == "c_call" and argument is not sys.setprofile:
            self.modules.add(getattr(argument, "__module__", None) or "builtins")


@jax.tree_util.register_pytree_node_class
class Untouchable:
    """A state that cannot even be looked at."""

    def tree_flatten(self) -> Any:
        raise AssertionError("the state was flattened")

    @classmethod
    def tree_unflatten(cls, _aux: Any, _children: Any) -> Any:
        raise AssertionError("the state was rebuilt")

    def get_state(self) -> Any:
        raise AssertionError("the host state was captured")


def saving(world: JobProcess) -> dict[str, Any]:
    """Twenty steps with both tiers on; what each ``save`` did in the training thread."""
    mesh = mesh_of(world.slices)
    coordination, transfer = Calls(), Calls()
    distributed.global_state.client = CountingClient(distributed.global_state.client, coordination)
    for name in ("inventory", "fetch_contents", "fetch_shards", "push_host_state"):
        setattr(TransferClient, name, transfer.counted(name, getattr(TransferClient, name)))
    steps: dict[int, dict[str, Any]] = {}
    settings = {"dir": str(world.root / "quiet_persistent"), **SETTINGS}
    with world.config("quiet", mesh=mesh, **settings).instantiate() as ckpt:
        iterator = Iterator(world.process)
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in STEPS:
            due = step % 5 == 0
            state: Any = state_at(step, mesh) if due else Untouchable()
            host_state: Any = iterator.at(step) if due else Untouchable()
            coordination.made.clear()
            transfer.made.clear()
            with Watch() as watch:
                started = ckpt.save(step=step, state=state, host_state=host_state)
            here = {"coordination": coordination.here(), "transfer": transfer.here()}
            finish(ckpt)
            steps[step] = {
                "started": started,
                "modules": sorted(watch.modules),
                **here,
                "coordination elsewhere": coordination.elsewhere(),
                "transfer elsewhere": transfer.elsewhere(),
            }
        world.meet()
    return steps


def one_after_the_other(world: JobProcess) -> dict[str, Any]:
    """Process 1 calls ``save`` only when process 0 has returned from it: no one waits for it."""
    mesh = mesh_of(world.slices)
    settings = {"dir": str(world.root / "alone_persistent"), "save_every": 5}
    with world.config("alone", mesh=mesh, **settings).instantiate() as ckpt:
        started = []
        for step in (5, 10):
            for process in range(world.count):
                if world.process == process:
                    iterator = Iterator(world.process).at(step)
                    state = state_at(step, mesh)
                    started.append(ckpt.save(step=step, state=state, host_state=iterator))
                world.meet()
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
        world.meet()
        return {"started": started, "steps": ckpt.all_steps()}


def restoring(world: JobProcess) -> dict[str, int]:
    """What a restore asks of peers, by the name of the call; process 0 has lost its RAM."""
    mesh, transfer = mesh_of(world.slices), Calls()
    for name in ("fetch_contents", "fetch_shards"):
        setattr(TransferClient, name, transfer.counted(name, getattr(TransferClient, name)))
    iterator = Iterator(world.process)
    with world.config("restoring", mesh=mesh).instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        ckpt.save(step=5, state=state_at(5, mesh), host_state=iterator.at(5))
        finish(ckpt)
        world.meet()
    host = None if world.process else 99
    with world.config("restoring", mesh=mesh, host=host).instantiate() as ckpt:
        assert ckpt.restore(state=specs_on(mesh), host_state=iterator)[0] == 5
        world.meet()
    made = Counter[str]()
    for (_, name), count in transfer.made.items():
        made[name] += count
    return made


PROGRAMS = {program.__name__: program for program in (one_after_the_other, saving, restoring)}

if __name__ == "__main__":
    run_program(PROGRAMS)
