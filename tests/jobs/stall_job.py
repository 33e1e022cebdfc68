"""Restores and saves that stand still in one process, or are slow; ``test_stalls.py`` judges."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from job_process import Iterator as Data
from job_process import JobProcess, mesh_of, programs_of, run_program, state_at
from restoring import lose, restore, train

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import Event
from emergency_ckpt.storage import chunks
from emergency_ckpt.storage.array_writes import ArrayWrites
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.server import Session

STEPS = range(1, 11)
STALL_S = 3.0
STUCK = 3
_FROZEN_S = 4 * STALL_S


@contextlib.contextmanager
def instead(owner: Any, name: str, work: Callable[..., Any]) -> Iterator[None]:
    """Let ``work`` run before a method of ``owner``."""
    real = getattr(owner, name)

    def both(self: Any, *args: Any, **more: Any) -> Any:
        work(*args, **more)
        return real(self, *args, **more)

    setattr(owner, name, both)
    try:
        yield
    finally:
        setattr(owner, name, real)


def judged(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    """Restore with a small limit; what came of it, in how long, and what was told meanwhile."""
    began_s = time.monotonic()
    seen = restore(world, name, stall_timeout_s=STALL_S, transfer_timeout_s=1.0, **settings)
    told = world.named("restore.progress")
    return {**seen, "seconds": time.monotonic() - began_s, "told": told}


def in_storage(world: JobProcess, name: str) -> dict[str, Any]:
    """Train, and lose all RAM; the settings of a job that then loads."""
    settings = {"dir": str(world.root / f"{name}_steps"), "save_every": 5}
    train(world, name, STEPS, **settings)
    world.meet()
    if world.process == 0:
        shutil.rmtree(world.root / name)
    world.meet()
    return settings


def stuck_peer(world: JobProcess) -> Any:
    """The only holders of slice 1's shards take the question, and say nothing more."""
    train(world, "peer", STEPS)
    lose(world, "peer", 2, 3)
    over = threading.Event()

    def hang(request: wire.Request) -> None:
        if isinstance(request, wire.GetShards):
            over.wait(60)

    def tell(event: Event) -> None:
        world.events.append((event.name, dict(event.fields)))
        if event.name == "restore.failed":
            over.set()  # else the server could not end

    with instead(Session, "_answer", hang):
        seen = judged(world, "peer", on_event=tell)
    return [seen, restore(world, "peer")]


def stuck_read(world: JobProcess) -> Any:
    """The storage of one process delivers nothing any more."""
    settings = in_storage(world, "read")
    over = threading.Event()

    def hang(*_: Any) -> None:
        if world.process == STUCK:
            over.wait(60)

    with instead(chunks._Reading, "_take", hang):
        seen = judged(world, "read", **settings)
        over.set()
    return [seen, restore(world, "read", **settings)]


def slow_reads(world: JobProcess) -> Any:
    """Storage is slow for all, and slower for one: longer than the limit, and never still."""
    settings = in_storage(world, "slow")
    pause_s = STALL_S / (2 if world.process == STUCK else 3)
    with instead(chunks._Reading, "_take", lambda *_: time.sleep(pause_s)):
        return judged(world, "slow", **settings)


def frozen(world: JobProcess) -> Any:
    """One process is stopped by a signal in the middle of its load, and goes on too late."""
    settings = in_storage(world, "frozen")
    pid = world.root / "pid"
    if world.process == STUCK:
        pid.write_text(str(os.getpid()))
    world.meet()

    def freeze() -> None:
        time.sleep(1.5 * STALL_S)  # it has told of itself by then
        os.kill(int(pid.read_text()), signal.SIGSTOP)
        time.sleep(_FROZEN_S)
        os.kill(int(pid.read_text()), signal.SIGCONT)

    thread = threading.Thread(target=freeze)
    if world.process == 0:
        thread.start()
    pause_s = STALL_S / 2 if world.process == STUCK else 0.0
    with instead(chunks._Reading, "_take", lambda *_: time.sleep(pause_s)):
        seen = judged(world, "frozen", **settings)
    if world.process == 0:
        thread.join()
    world.meet()
    return [seen, restore(world, "frozen", **settings)]


def paused(world: JobProcess) -> Any:
    """An engine stops all processes in the middle of a load, for longer than the limit."""
    settings = in_storage(world, "paused")
    with _paused_by_an_engine(world, chunks._Reading, "_take", 1.0):
        return judged(world, "paused", **settings)


def paused_in_a_save(world: JobProcess) -> Any:
    with _paused_by_an_engine(world, ArrayWrites, "_write_batch", 0.5):
        return _saved(world, "paused_save", 0.0, hangs=False)


_PAUSE = """
import os, pathlib, signal, sys, time
before_s, pause_s, moves, *pids = sys.argv[1:]
while not pathlib.Path(moves).exists():
    time.sleep(0.05)
for sent in (signal.SIGSTOP, signal.SIGCONT):
    time.sleep(float(pause_s if sent == signal.SIGCONT else before_s))
    for pid in pids:
        os.kill(int(pid), sent)
"""


@contextlib.contextmanager
def _paused_by_an_engine(
    world: JobProcess, owner: Any, name: str, before_s: float
) -> Iterator[None]:
    """Slow ``name`` down; another process stops the job's, so long after its first call."""
    moves = world.root / f"moves_{name}"
    (world.root / f"pid_{world.process}").write_text(str(os.getpid()))

    def slowly(*_: Any) -> None:
        moves.touch()
        time.sleep(STALL_S / 2)

    world.meet()
    engine: subprocess.Popen[bytes] | None = None
    if world.process == 0:
        pids = [path.read_text() for path in world.root.glob("pid_*")]
        times = [str(before_s), str(_FROZEN_S)]
        engine = subprocess.Popen([sys.executable, "-c", _PAUSE, *times, moves, *pids])
    world.meet()
    try:
        with instead(owner, name, slowly):
            yield
    finally:
        if engine is not None:
            assert engine.wait(60) == 0


def _saved(world: JobProcess, name: str, pause_s: float, *, hangs: bool) -> Any:
    """Save to storage once, with a pause before each batch, or a hang in one process."""
    mesh, over = mesh_of(world.slices), threading.Event()

    def wait(*_: Any) -> None:
        if hangs and world.process == 1:
            over.wait(60)
        time.sleep(pause_s)

    settings = {"dir": str(world.root / f"{name}_steps"), "save_every": 5, "mesh": mesh}
    began_s = time.monotonic()
    with world.config(name, stall_timeout_s=STALL_S, **settings).instantiate() as ckpt:
        with instead(ArrayWrites, "_write_batch", wait):
            data = Data(world.process).at(5)
            ckpt.save(step=5, state=state_at(5, mesh), host_state=data)
            ckpt.wait_until_finished()
        seconds, error = time.monotonic() - began_s, ""
        try:
            ckpt.check_for_errors()
        except CheckpointError as failure:
            error = f"{type(failure).__name__}: {failure}"
        over.set()
        told = world.named("persistent.progress")
        return {"error": error, "seconds": seconds, "told": told}


def stuck_write(world: JobProcess) -> Any:
    return _saved(world, "write", 0.0, hangs=True)


if __name__ == "__main__":
    run_program(programs_of(globals()))
