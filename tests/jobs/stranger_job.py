"""A stranger who changes what one process is about to read from the coordination service."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Generator
from typing import Any

from coordination_stranger import attack
from job_process import JobProcess, mesh_of, run_program, specs_on, state_at
from restoring import restore, train

from emergency_ckpt.cluster.coordination import JaxCoordinator
from emergency_ckpt.errors import CheckpointError

KEYS = {"plan": r"restore/\d+/answer/\d+\.told/0", "verdict": r"restore/\d+/\d+/status\.told"}
FORGED = b'{"type":"plan"}'.hex()
Act = Callable[[str], None]
Told = dict[str, str]


def _address() -> str:
    return os.environ["ECKPT_COORDINATOR_ADDRESS"]


@contextlib.contextmanager
def before_reading(key: str, act: Act, *, below: str = "") -> Generator[list[str]]:
    """Let a stranger ``act`` on the first key like ``key``, once it is set and before it is read.

    With ``below``, when everything below it is read: on the entry of that name. Gives the keys.
    """
    wanted, acted, method = re.compile(key), list[str](), "list" if below else "get"
    real: Any = getattr(JaxCoordinator, method)

    def read(self: Any, name: str, *timeout_s: float) -> Any:
        if not acted and wanted.fullmatch(name):
            target = f"{name}{below}"
            while self.find(target) is None:
                time.sleep(0.01)
            acted.append(name)
            act(self._key(target))
        return real(self, name, *timeout_s)

    setattr(JaxCoordinator, method, read)
    try:
        yield acted
    finally:
        setattr(JaxCoordinator, method, real)


def _restored(world: JobProcess, name: str, key: str, act: Act) -> Any:
    """Restore once; at process 1 the stranger acts on ``key`` first."""
    with contextlib.ExitStack() as stack:
        acted = ["nothing to do"]
        if world.process == 1:
            acted = stack.enter_context(before_reading(key, act))
        seen = restore(world, name, restore_timeout_s=20)
    assert acted, "the stranger came too late"
    return seen


def _steered(world: JobProcess, what: str, how: str) -> Any:
    """Record a restore of step 5; train on; then the stranger steers one of step 10."""
    name, recorded = f"{what}_{how}", Told()

    def record(key: str) -> None:
        recorded["value"] = attack(_address(), "find", key)

    def act(key: str) -> None:
        if how == "deleted":
            attack(_address(), "delete", key)
        else:
            value = recorded["value"] if how == "replayed" else FORGED
            attack(_address(), "set", key, value)

    train(world, name, range(1, 6))
    older = _restored(world, name, KEYS[what], record)
    train(world, name, range(6, 11))
    attacked = _restored(world, name, KEYS[what], act)
    return {"older": older, "attacked": attacked, "after": restore(world, name)}


def _voted(world: JobProcess, how: str) -> Any:
    """The ballot of process 1 on step 10 is changed before the leader counts."""

    def act(key: str) -> None:
        if how == "deleted":
            attack(_address(), "delete", key)
        else:
            other = f"{key.removesuffix('/1')}/0"
            value = attack(_address(), "find", other) if how == "moved" else FORGED
            attack(_address(), "set", key, value)

    ballots = before_reading(r"vote/\w+/10/ballot", act, below="/1")
    return _saved(world, f"ballot_{how}", range(1, 11), {0: ballots}, save_timeout_s=5)


def _decided(world: JobProcess) -> Any:
    """The decision on step 10 is deleted before process 1 reads it; all save step 15 as well."""

    def act(key: str) -> None:
        attack(_address(), "delete", key)

    decision = before_reading(r"vote/\w+/10/decision", act)
    return _saved(world, "decision_deleted", range(1, 16), {1: decision}, save_timeout_s=60)


def _saved(
    world: JobProcess,
    name: str,
    steps: range,
    attacks: dict[int, contextlib.AbstractContextManager[list[str]]],
    **settings: Any,
) -> Any:
    """Save at each of ``steps``, and attack by process; return what was complete, and errors."""
    errors, mesh = list[str](), mesh_of(world.slices)
    with (
        world.config(name, **settings).instantiate() as ckpt,
        contextlib.ExitStack() as stack,
    ):
        ckpt.restore(state=specs_on(mesh))
        acted = ["nothing to do"]
        if world.process in attacks:
            acted = stack.enter_context(attacks[world.process])
        for step in steps:
            ckpt.save(step=step, state=state_at(step, mesh))
            ckpt.wait_until_finished()
        try:
            ckpt.check_for_errors()
        except CheckpointError as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert acted, "the stranger came too late"
        world.meet()
    complete = [event["step"] for event in world.named("save.complete")]
    return {"complete": complete, "errors": errors}


def known_by_reading(world: JobProcess) -> Any:
    """Which keys there are while a job of a made-up secret runs, and whether one has the secret."""
    secret = os.environ.pop("ECKPT_JOB_SECRET")
    try:
        with world.config("reading").instantiate() as ckpt:
            world.meet()
            member: Any = ckpt._opened.member  # pyright: ignore[reportPrivateUsage]
            keys = attack(_address(), "list", "eckpt").splitlines()
            values = [attack(_address(), "find", key) for key in keys if "/secret" in key]
            made_up: str = member.secret.value.hex()
            world.meet()
    finally:
        os.environ["ECKPT_JOB_SECRET"] = secret
    return {"keys": len(keys), "of_the_exchange": len(values), "read": made_up in "".join(values)}


PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    **{
        f"{what}_{how}": functools.partial(_steered, what=what, how=how)
        for what in KEYS
        for how in ("written", "deleted", "replayed")
    },
    **{
        f"ballot_{how}": functools.partial(_voted, how=how)
        for how in ("written", "deleted", "moved")
    },
    "decision_deleted": _decided,
    "known_by_reading": known_by_reading,
}

if __name__ == "__main__":
    run_program(PROGRAMS)
