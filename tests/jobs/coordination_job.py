"""The conformance suite of coordinators, run by every process of a real job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from coordination_suite import CHECKS, Check
from jax._src import distributed
from job_process import JobProcess, run_program
from memory_coordination import meet

from emergency_ckpt.cluster.coordination import JaxCoordinator, connect, own_address

CLIENT_METHODS = (
    "key_value_set_bytes",
    "blocking_key_value_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
    "key_value_try_get_bytes",
)


def private_module(world: JobProcess) -> dict[str, Any]:
    """The smoke test of the one private module that the package uses."""
    client = distributed.global_state.client
    return {
        "missing": [name for name in CLIENT_METHODS if not callable(getattr(client, name, None))],
        "is_jax_error": issubclass(jax.errors.JaxRuntimeError, Exception),
        "connected": type(connect("smoke")).__name__,
        "address": own_address(),
    }


def namespaces(world: JobProcess) -> list[str]:
    """The connections of two starts do not see each other's keys."""
    first, second = connect("first"), connect("second")
    first.put(f"key/{world.process}", b"first")
    second.put(f"key/{world.process}", b"second")
    if world.process == 0:
        second.delete("key")
    meet(second, "done", 60)
    return [value.decode() for value in first.list("key").values()]


def _run(name: str, check: Check, world: JobProcess) -> str:
    # Not ``connect``: it gives the local coordinator to a job of one process.
    client = distributed.global_state.client
    check(JaxCoordinator(client, f"suite/{name}", world.process, world.count))
    return "passed"


PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    "private_module": private_module,
    "namespaces": namespaces,
    **{name: functools.partial(_run, name, check) for name, check in CHECKS.items()},
}

if __name__ == "__main__":
    run_program(PROGRAMS)
