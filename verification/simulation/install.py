"""The product, imported so that it sees the simulated operating system, network, clock and JAX.

Each module of ``emergency_ckpt`` is imported while ``sys.modules`` has the simulation's modules
under the names that it imports. Nothing in the product knows of it.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import importlib
import logging
import pkgutil
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import arrays
import bucket
import devices
import futures
import native_sockets
import network
import service
import sim
import storage
import system
import threads

_LEFT_OUT = frozenset(("_native", "axlearn", "maxtext", "tools"))
_LEFT_OUT |= frozenset(("metrics", "draining", "orbax", "report", "survey", "testing"))


def product() -> Any:
    """Import the product under the simulation, once; return its package."""
    if "emergency_ckpt.checkpointer" in sys.modules:
        return sys.modules["emergency_ckpt"]
    _import_what_stays_real()
    replaced = _replacements()
    kept = {name: sys.modules.get(name) for name in replaced}
    for name in [
        name
        for name in sys.modules
        if name.startswith("emergency_ckpt.") or name == "emergency_ckpt"
    ]:
        if name != "emergency_ckpt._native":
            del sys.modules[name]
    sys.modules.update(replaced)
    try:
        package = importlib.import_module("emergency_ckpt")
        modules = _all_below(package)
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    for module in modules:
        _separate(module)
    _leave_secrets_as_they_are()
    _connect()
    storage.install()
    bucket.install()
    arrays.install()
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would run finalizers at a moment that no seed decides
    return package


def _leave_secrets_as_they_are() -> None:
    """Stretch no secret: that is a fifth of the work of a life, and shows nothing here."""

    def digest(run_id: str, secret: bytes) -> bytes:
        return hashlib.sha256(f"{run_id} ".encode() + secret).digest()

    for name in ("run_secret", "cluster.membership"):
        vars(importlib.import_module(f"emergency_ckpt.{name}"))["stretched"] = digest


def checkpointer(**sizes: int) -> Any:
    """Return the product's class of checkpointers, with buffers of ``sizes``."""
    own = product().EmergencyCheckpointer
    plan = importlib.import_module("emergency_ckpt.core.save.snapshot_plan")
    return type(own.__name__, (own,), {"_buffers": plan.Buffers(**sizes)})


def config(**limits: float) -> Any:
    """Return a config of the product in which ``limits`` do not follow from other settings."""
    own = product().CheckpointerConfig
    return type(own.__name__, (own,), limits)()


def _all_below(package: ModuleType) -> list[ModuleType]:
    found = [package]
    for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if each.name.split(".")[1] in _LEFT_OUT:
            continue
        module = importlib.import_module(each.name)
        found += _all_below(module) if each.ispkg else [module]
    return found


def _import_what_stays_real() -> None:
    import jax  # noqa: F401, PLC0415
    import orbax.checkpoint.checkpoint_managers  # noqa: F401, PLC0415

    import emergency_ckpt.checkpointer  # noqa: PLC0415 - everything it needs of others
    import emergency_ckpt.storage.step_writer  # noqa: F401, PLC0415


def _replacements() -> dict[str, ModuleType]:
    queue = _queue_module()
    return {
        "threading": threads.threading_module(),
        "concurrent.futures": futures.futures_module(),
        "time": threads.time_module(),
        "queue": queue,
        "os": system.os_module(),
        "secrets": system.secrets_module(),
        "socket": network.socket_module(),
        "selectors": network.selectors_module(),
        "atexit": system.Ignored("atexit"),
        "jax": devices.jax_module(),
    }


class _Empty(Exception):
    """``queue.Empty``."""


class _SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._waiters: list[Any] = []

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        for task in self._waiters:
            sim.scheduler.wake(task)
        sim.scheduler.point()

    def get(self, timeout: float) -> Any:
        if not self._items:
            sim.scheduler.wait_among(self._waiters, timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise _Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


def _queue_module() -> ModuleType:
    module = ModuleType("queue")
    vars(module).update(SimpleQueue=_SimpleQueue, Queue=_SimpleQueue, Empty=_Empty, Full=_Empty)
    return module


class _Separate:
    """A module's variable of which each simulated process has its own value."""

    def __init__(self, name: str, make: Any) -> None:
        self._name, self._make = name, make

    def _own(self) -> Any:
        task = sim.scheduler.current
        if task is None:
            return self._make()
        values = task.process.globals
        if self._name not in values:
            values[self._name] = self._make()
        return values[self._name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __enter__(self) -> Any:
        return self._own().__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._own().__exit__(*error)

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._own()

    def __iter__(self) -> Any:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def _separate(module: ModuleType) -> None:
    """Give each simulated process its own of the module's variables that change."""
    import weakref  # noqa: PLC0415

    kinds = (
        threads.Lock,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
        collections.deque,
    )
    changing = {"_instances", "LATE_CHANGES", "SIGTERM"}
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", "").startswith("emergency_ckpt") and name not in changing:
            continue
        if (
            name not in changing
            and type(value) not in kinds
            and not isinstance(value, threads.Lock)
        ):
            continue
        if isinstance(value, type):
            continue
        key = (
            f"{type(value).__module__}.{name}"
            if name in ("LATE_CHANGES", "SIGTERM")
            else f"{module.__name__}.{name}"
        )
        kind = type(value)
        if isinstance(value, collections.deque):
            length = value.maxlen
            vars(module)[name] = _Separate(
                key, lambda length=length: collections.deque(maxlen=length)
            )
        else:
            vars(module)[name] = _Separate(key, kind)


def _connect() -> None:
    native: Any = native_sockets.NativeSockets()
    for name in ("transfer.stream", "transfer.sealing"):
        vars(sys.modules[f"emergency_ckpt.{name}"])["_native"] = native
    # A collector ends what nothing refers to at any instant, so no history would come twice. And
    # a finaliser would keep what a killed process had open.
    made = vars(sys.modules["emergency_ckpt.checkpointer"])
    made["EmergencyCheckpointer"]._end_others = lambda _: None
    made["weakref"] = SimpleNamespace(finalize=lambda *_: SimpleNamespace())
    # Its lock would be a point in the first history of a process and in no later one.
    # No handler of the simulation's own process is set.
    vars(sys.modules["emergency_ckpt.cluster.preemption"])["_in_main_thread"] = lambda: False
    vars(sys.modules["emergency_ckpt.json_decoders"])["_making"] = contextlib.nullcontext()
    vars(sys.modules["emergency_ckpt.state.snapshot"])["memoryview"] = devices.memory_of
    vars(sys.modules["emergency_ckpt.cluster.coordination"])["distributed"] = service.Distributed()
