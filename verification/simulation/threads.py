"""``threading`` and ``time`` as the simulated processes see them."""

from __future__ import annotations

import contextlib
import itertools
import time as real_time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import sim
from scheduler import Killed, Task


class Lock:
    """``threading.Lock``: who waits is woken in an order that the seed decides."""

    def __init__(self) -> None:
        self._owner: Task | bool | None = None
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = sim.scheduler
        task = scheduler.current
        if task is None:
            self._owner = True
            return True
        if self._owner is None or not task.process.alive:
            scheduler.point()
        deadline_s = None if timeout < 0 else scheduler.now_s + timeout
        while self._owner is not None:
            if not blocking:
                return False
            left_s = None if deadline_s is None else deadline_s - scheduler.now_s
            if left_s is not None and left_s <= 0:
                return False
            scheduler.wait_among(self._waiting, left_s)
        self._owner = task
        return True

    def release(self) -> None:
        scheduler = sim.scheduler
        if self._owner is None and scheduler.current is not None:
            if not scheduler.current.process.alive:
                return
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiting:
            chosen = int(scheduler.random.random() * len(self._waiting))
            scheduler.wake(self._waiting.pop(chosen))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """``threading.RLock``."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner is sim.scheduler.current:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._depth = 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            super().release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = getattr(self._lock, "_depth", 1)
        if isinstance(self._lock, RLock):
            self._lock._depth = 1
        self._lock.release()
        try:
            return sim.scheduler.wait_among(
                self._waiters, None if timeout is None else max(timeout, 0)
            )
        finally:
            self._lock.acquire()
            if isinstance(self._lock, RLock):
                self._lock._depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline_s = None if timeout is None else sim.scheduler.now_s + timeout
        result = predicate()
        while not result:
            left_s = None if deadline_s is None else deadline_s - sim.scheduler.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        scheduler = sim.scheduler
        for _ in range(min(n, len(self._waiters))):
            chosen = int(scheduler.random.random() * len(self._waiters))
            scheduler.wake(self._waiters.pop(chosen))

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            sim.scheduler.wake(task)
        sim.scheduler.point()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = sim.scheduler
        scheduler.point()
        deadline_s = None if timeout is None else scheduler.now_s + timeout
        while not self._set:
            left_s = None if deadline_s is None else deadline_s - scheduler.now_s
            if left_s is not None and left_s <= 0:
                break
            scheduler.wait_among(self._waiters, left_s)
        return self._set


class Thread:
    """``threading.Thread``: a task of the process that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._task: Task | None = None
        self._done = Event()

    def start(self) -> None:
        scheduler = sim.scheduler
        scheduler.check()
        self._task = scheduler.spawn(scheduler.here().process, self.name, self._body)
        scheduler.point()

    def _body(self) -> None:
        sim.scheduler.here().local[0] = {"thread": self}
        try:
            self.run()
        finally:
            self._target = None
            self._args = ()
            with contextlib.suppress(Killed):
                self._done.set()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._done.is_set()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number


class _MainThread(Thread):
    """Stands for the task that the world started as a process's main thread."""


class Local:
    """``threading.local``."""

    def __init__(self) -> None:
        object.__setattr__(self, "_key", next(_local_keys))

    def _values(self) -> dict[str, Any]:
        task = sim.scheduler.current
        local = _outside if task is None else task.local
        return local.setdefault(object.__getattribute__(self, "_key"), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value


_local_keys = itertools.count(1)
_outside: dict[int, dict[str, Any]] = {}


def _current_thread() -> Thread:
    task = sim.scheduler.here()
    values = task.local.setdefault(0, {})
    if "thread" not in values:
        thread = _MainThread(name=task.name)
        thread._task = task
        values["thread"] = thread
    return values["thread"]


def _main_thread() -> Thread:
    first = sim.scheduler.here().process.tasks[0]
    values = first.local.setdefault(0, {})
    if "thread" not in values:
        thread = _MainThread(name=first.name)
        thread._task = first
        values["thread"] = thread
    return values["thread"]


def _enumerate() -> list[Thread]:
    tasks = sim.scheduler.here().process.tasks
    found = [task.local.get(0, {}).get("thread") for task in tasks if not task.ended]
    return [thread for thread in found if thread is not None]


def threading_module() -> ModuleType:
    """Return the module that stands for ``threading``."""
    module = ModuleType("threading")
    vars(module).update(
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Event=Event,
        Thread=Thread,
        local=Local,
        get_ident=lambda: sim.scheduler.here().number,
        get_native_id=lambda: sim.scheduler.here().number,
        current_thread=_current_thread,
        main_thread=_main_thread,
        enumerate=_enumerate,
        TIMEOUT_MAX=1e9,
    )
    return module


WALL_CLOCK_S = 1_790_000_000.0
"""What the wall clock of a host shows at the virtual time 0, before it jumps."""


def _sleep(seconds: float) -> None:
    sim.scheduler.call(seconds)


def wall_s() -> float:
    """Return what the wall clock of the running task's host shows."""
    task = sim.scheduler.current
    ahead_s = 0.0 if task is None else getattr(task.process.host, "clock_ahead_s", 0.0)
    return WALL_CLOCK_S + sim.scheduler.now_s + ahead_s


def time_module() -> ModuleType:
    """Return the module that stands for ``time``; each host has a wall clock of its own."""
    module = ModuleType("time")
    vars(module).update(vars(real_time))

    vars(module).update(
        monotonic=lambda: sim.scheduler.now_s,
        monotonic_ns=lambda: int(sim.scheduler.now_s * 1e9),
        perf_counter=lambda: sim.scheduler.now_s,
        time=wall_s,
        time_ns=lambda: int(wall_s() * 1e9),
        sleep=_sleep,
    )
    return module
