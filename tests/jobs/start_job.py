"""Starts of a job that cannot go well: each process tells how it ended, and how long it took."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, finish, mesh_of, programs_of, run_program, state_at
from launch_support import wait_until
from persistent_steps import complete_steps, life, writer_of

from emergency_ckpt import start
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.observer import JobView, Observer
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.transfer import TransferServer

DEADLINE_S = 40.0
"""Long enough to show that nobody waits for it."""


def attempt(world: JobProcess, name: str, **settings: Any) -> dict[str, str]:
    settings = {"start_timeout_s": DEADLINE_S, **settings}
    try:
        with world.config(name, **settings).instantiate():
            return {"error": "", "text": ""}
    except Exception as error:  # noqa: BLE001 - the outcome
        return {"error": type(error).__name__, "text": str(error)}


def another_dir(world: JobProcess) -> Any:
    """The name of the run hangs on the directory."""
    directory = str(world.root / f"persistent_{world.process}")
    return attempt(world, "another_dir", run_id=None, dir=directory)


def another_interval(world: JobProcess) -> Any:
    return attempt(world, "another_interval", local_save_every=5 + world.process)


def invalid_at_one(world: JobProcess) -> Any:
    settings = {"local_save_every": -1} if world.process == 1 else {}
    return attempt(world, "invalid_at_one", **settings)


def split_along_the_axis(world: JobProcess) -> Any:
    """The slice that writes to storage has a half of the leaf."""
    mesh = mesh_of(2)
    sharding = NamedSharding(mesh, P("slice"))
    state = {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)}
    settings = {"dir": str(world.root / "split_stored"), "save_every": 5, "mesh": mesh}
    with world.config("split", replica_axis="slice", **settings).instantiate() as ckpt:
        try:
            ckpt.restore(state=state)
        except CheckpointError as error:
            return {"error": type(error).__name__, "text": str(error)}
    return {"error": ""}


def another_secret(world: JobProcess) -> Any:
    file = world.root / f"secret_{world.process}"
    file.write_text(hashlib.sha256(str(world.process).encode()).hexdigest())
    file.chmod(0o600)
    return attempt(world, "another_secret", secret_file=str(file))


def no_secret_at_one(world: JobProcess) -> Any:
    with _environment(world.process == 0):
        return attempt(world, "no_secret_at_one", require={"secret"})


def made_up(world: JobProcess) -> Any:
    with _environment(False):
        return _warnings(world, "made_up")


def launched(world: JobProcess) -> Any:
    with _environment(True):
        return _warnings(world, "launched", require={"secret"})


def _warnings(world: JobProcess, name: str, **settings: Any) -> Any:
    with world.config(name, **settings).instantiate():
        return {"warnings": [fields["text"] for fields in world.named("warning.setting")]}


@contextlib.contextmanager
def _environment(has_secret: bool) -> Generator[None]:
    """The environment of a process that was started with the launcher's secret, or without."""
    secret = os.environ.pop("ECKPT_JOB_SECRET")
    try:
        if has_secret:
            os.environ["ECKPT_JOB_SECRET"] = secret
        yield
    finally:
        os.environ["ECKPT_JOB_SECRET"] = secret


def storage_refuses(world: JobProcess) -> Any:
    """Where the host states would lie is a file."""
    directory = world.root / "refusing"
    directory.mkdir(exist_ok=True)
    (directory / "host_state").write_text("in the way")
    settings = {"dir": str(directory), "save_every": 2, "require": {"storage"}}
    return attempt(world, "storage_refuses", **settings)


def storage_unknown_to_one(world: JobProcess) -> Any:
    """One image lacks the package for the bucket; mended, the job starts on the same hosts."""
    lacking = ConfigError(["gs:// needs gcsfs, which is not installed"], target="gs://bucket")
    settings = {"dir": str(world.root / "unknown"), "save_every": 2}
    with contextlib.ExitStack() as stack:
        if world.process == 1:
            refuses = mock.patch.object(PersistentTier, "__init__", side_effect=lacking)
            stack.enter_context(refuses)
        refused = attempt(world, "storage_unknown_to_one", **settings)
    return refused, attempt(world, "storage_unknown_to_one", **settings)


class _Unready(Observer):
    def begin(self, process_index: int) -> None:
        raise OSError(28, "No space left on device")


def observer_of_one_begins_badly(world: JobProcess) -> Any:
    """Of the leader, then of another process; mended, the job starts on the same hosts."""
    name = "observer"
    return [
        attempt(world, name, **({"on_event": _Unready()} if world.process == failing else {}))
        for failing in (0, 1, None)
    ]


def no_thread_for_notices(world: JobProcess) -> Any:
    """The limit of processes is reached on one host; later the job starts on the same hosts."""
    name, full = "no_thread", RuntimeError("can't start new thread")
    with contextlib.ExitStack() as stack:
        if world.process == 1:
            stack.enter_context(mock.patch.object(start, "find_notices", side_effect=full))
        refused = attempt(world, name)
    return refused, attempt(world, name)


def closed_port(world: JobProcess) -> Any:
    with _without_server(world.process == 1):
        return attempt(world, "closed_port", require={"peers"})


def closed_port_told(world: JobProcess) -> Any:
    with _without_server(world.process == 1), world.config("told").instantiate():
        if world.process == 0:
            wait_until(lambda: bool(world.named("warning.setting")), "a warning of the port")
        world.meet()
        return [fields["text"] for fields in world.named("warning.setting")]


@contextlib.contextmanager
def _without_server(is_here: bool) -> Generator[None]:
    """As behind a firewall: nothing answers at the address that this process has announced."""
    with contextlib.ExitStack() as stack:
        if is_here:
            start = TransferServer.start
            closed = mock.patch.object(
                TransferServer, "start", lambda own: [start(own), own.stop()]
            )
            stack.enter_context(closed)
        yield


def leave_claim(directory: Path, run_id: str, incarnation: str) -> dict[str, Any]:
    """As a job has left it; returns the settings of one that saves there."""
    if jax.process_index() == 0:  # both would write one file, under one name until it is whole
        writer_of(PersistentTier(str(directory)), run_id).hold(incarnation)
    return {"dir": str(directory), "save_every": 1, "local_save_every": 0}


def directory_of_another_run(world: JobProcess) -> Any:
    directory = world.root / "in_use"
    settings = leave_claim(directory, "another", life(1))
    return attempt(world, "directory_of_another_run", **settings)


class _TakenPort(Observer):
    def join(self, job: JobView) -> None:
        raise RuntimeError("its port is taken")


def failed_start_in_a_new_directory(world: JobProcess) -> Any:
    """A run whose start fails on one process, and then another run in the same directory."""
    directory = world.root / "new"
    settings = {"dir": str(directory), "save_every": 1, "local_save_every": 0}
    of_one = {"on_event": _TakenPort()} if world.process == 1 else {}
    failed = attempt(world, "failed_first", **settings, **of_one)
    world.meet()
    return failed, attempt(world, "another_then", **settings)


def many_lives(world: JobProcess) -> Any:
    """The first writer is process 1, and storage alone knows how many lives there were."""
    mesh = mesh_of(2, [1, 0])
    directory = world.root / "lives"
    settings = leave_claim(directory, "lives", life(10**11))
    config = world.config("many_lives", **settings, run_id="lives", mesh=mesh)
    with config.instantiate() as checkpointer:
        saved = checkpointer.save(step=1, state=state_at(1, mesh))
        finish(checkpointer)
        whole = complete_steps(str(directory))
    return {"saved": saved, "whole": whole}


if __name__ == "__main__":
    run_program(programs_of(globals()))
