"""JAX's coordination service in memory, behind the client that ``cluster/coordination`` calls.

It may be slow, lose a call or its reply, or end with the process that runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import sim
from scheduler import Task

Error: Any = jax.errors.JaxRuntimeError


class Service:
    """The keys of one life of the job. ``gone``: the process that ran it has ended."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[Task]] = {}
        self.most_keys = 0
        self.gone = False
        self.calls = 0
        self.delay: Callable[[], float] = lambda: 0.0
        self.fault: Callable[[str, str], str] = lambda operation, key: ""
        """Returns "", "lost" (no effect) or "unheard" (an effect without a reply)."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake who waits for it."""
        self.values[key] = value
        self.most_keys = max(self.most_keys, len(self.values))
        for task in self.waiting.pop(key, ()):
            sim.scheduler.wake(task)


class Client:
    """One process's connection to the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _arrive(self, operation: str, key: str) -> bool:
        """Carry a call to the service; return whether its reply will be lost."""
        service, scheduler = self._service, sim.scheduler
        service.calls += 1
        scheduler.call(service.delay())
        fault = service.fault(operation, key)
        if service.gone or fault == "lost":
            scheduler.sleep(0.5)
            raise Error(f"UNAVAILABLE: {operation} {key}: the service does not answer")
        return fault == "unheard"

    def _reply(self, lost: bool, operation: str, key: str) -> None:
        if lost:
            raise Error(f"UNAVAILABLE: {operation} {key}: no reply")
        sim.scheduler.call(self._service.delay())

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        lost = self._arrive("set", key)
        if not allow_overwrite and key in self._service.values:
            raise Error(f"ALREADY_EXISTS: {key}")
        self._service.set(key, bytes(value))
        self._reply(lost, "set", key)

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        self._arrive("get", key)
        service, scheduler = self._service, sim.scheduler
        deadline_s = scheduler.now_s + timeout_ms / 1000
        while key not in service.values:
            left_s = deadline_s - scheduler.now_s
            if left_s <= 0:
                raise Error(f"DEADLINE_EXCEEDED: {key}")
            task = scheduler.here()
            service.waiting.setdefault(key, []).append(task)
            try:
                scheduler.block(left_s)
            finally:
                if task in service.waiting.get(key, ()):
                    service.waiting[key].remove(task)
                    if not service.waiting[key]:
                        del service.waiting[key]
        value = service.values[key]
        self._reply(False, "get", key)
        return value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        lost = self._arrive("find", key)
        if key not in self._service.values:
            raise Error(f"NOT_FOUND: {key}")
        value = self._service.values[key]
        self._reply(lost, "find", key)
        return value

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        lost = self._arrive("list", prefix)
        values = self._service.values
        found = [(k, v) for k, v in values.items() if k.startswith(prefix + "/")]
        self._reply(lost, "list", prefix)
        return found

    def key_value_delete(self, prefix: str) -> None:
        lost = self._arrive("delete", prefix)
        values = self._service.values
        for key in [k for k in values if k == prefix or k.startswith(prefix + "/")]:
            del values[key]
        self._reply(lost, "delete", prefix)


class Distributed:
    """Stands for ``jax._src.distributed``: each simulated process has its own client."""

    @property
    def global_state(self) -> Any:
        task = sim.scheduler.here()
        return SimpleNamespace(
            client=task.process.globals.get("client"),
            preemption_sync_manager=None,
            coordinator_address=None,
        )
