"""Coordination in tests: meetings, and a service in memory with coordinators for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from emergency_ckpt.cluster import Coordinator
from emergency_ckpt.errors import CheckpointError, CoordinationError, DeadlineExceeded


def everywhere(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns or raises for each of ``count`` processes, all at once."""

    def one(process: int) -> Any:
        try:
            return work(process)
        except Exception as error:  # noqa: BLE001 - judged by the test
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def meet(coordinator: Coordinator, name: str, timeout_s: float) -> None:
    """Return when every process has called with this ``name``; each name is used once."""
    coordinator.put(f"{name}/{coordinator.process_index}", b"")
    for process in range(coordinator.process_count):
        coordinator.get(f"{name}/{process}", timeout_s)


def tell_address(coordinator: Coordinator, process: int, address: str) -> None:
    """Say the hello of ``process``, in which its peers find its address."""
    hello = {"address": address, "known": {}, "error": ""}
    coordinator.put(f"hello/{process}", msgspec.json.encode(hello))


class MemoryService:
    """The service; ``member(i)`` is the coordinator of process ``i``. Thread-safe.

    Keeps the contract of ``cluster.coordination.Coordinator``. ``fail`` plans faults.
    """

    def __init__(self, process_count: int) -> None:
        self.process_count = process_count
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self._faults: list[tuple[int, str, str, CheckpointError]] = []

    def member(self, process_index: int) -> MemoryCoordinator:
        """Return the coordinator of one process."""
        return MemoryCoordinator(self, process_index)

    def fail(self, process_index: int, operation: str, part: str, error: CheckpointError) -> None:
        """Make the process's next ``operation`` ("put", "get", ...) with ``part`` in its key fail.

        It raises ``error`` and has no effect.
        """
        with self.changed:
            self._faults.append((process_index, operation, part, error))

    def check(self, process_index: int, operation: str, key: str) -> None:
        """Raise and remove the first planned fault that matches. The caller holds ``changed``."""
        for fault in self._faults:
            if fault[:2] == (process_index, operation) and fault[2] in key:
                self._faults.remove(fault)
                raise fault[3]


class MemoryCoordinator:
    """One process's coordinator of a ``MemoryService``."""

    def __init__(self, service: MemoryService, process_index: int) -> None:
        self._service = service
        self._process_index = process_index

    @property
    def process_index(self) -> int:
        return self._process_index

    @property
    def process_count(self) -> int:
        return self._service.process_count

    def put(self, key: str, value: bytes) -> None:
        service = self._service
        with service.changed:
            service.check(self._process_index, "put", key)
            if key in service.values:
                raise CoordinationError("put", key, "the key is set already")
            service.values[key] = value
            service.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        service = self._service
        with service.changed:
            service.check(self._process_index, "get", key)
            if not service.changed.wait_for(lambda: key in service.values, timeout_s):
                raise DeadlineExceeded("wait for", key, f"not set within {timeout_s:g} s")
            return service.values[key]

    def list(self, prefix: str) -> Mapping[str, bytes]:
        start = len(prefix) + 1
        service = self._service
        with service.changed:
            service.check(self._process_index, "list", prefix)
            return {k[start:]: v for k, v in service.values.items() if k.startswith(prefix + "/")}

    def delete(self, prefix: str) -> None:
        service = self._service
        with service.changed:
            service.check(self._process_index, "delete", prefix)
            for key in [k for k in service.values if k == prefix or k.startswith(prefix + "/")]:
                del service.values[key]

    def find(self, key: str) -> bytes | None:
        service = self._service
        with service.changed:
            service.check(self._process_index, "find", key)
            return service.values.get(key)

    def replace(self, key: str, value: bytes) -> None:
        service = self._service
        with service.changed:
            service.check(self._process_index, "replace", key)
            service.values[key] = value
            service.changed.notify_all()
