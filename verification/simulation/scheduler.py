"""The scheduler: every thread of every simulated process is a greenlet of one operating system
thread, and a seed decides which of them runs next. Time is virtual: it moves when all wait.

A *point* is a call at which another thread may run: a lock, a wait, a sleep, a system call on a
file, a message. Code between two points runs undisturbed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

READY, RUNNING, BLOCKED, DELAYED = range(4)


class Killed(GreenletExit):
    """Unwinds a thread of a simulated process that was killed; nothing it does has an effect."""


class Stuck(AssertionError):
    """A wait without an end: too much virtual time or too many points in one life."""


class Process:
    """One simulated operating system process: its threads, and what it holds in memory."""

    def __init__(self, name: str, index: int, host: Any) -> None:
        self.name = name
        self.index = index
        self.host = host
        self.pid = 0
        self.alive = True
        self.tasks: list[Task] = []
        self.globals: dict[str, Any] = {}
        self.calls_left = -1
        """Number of calls (of files, messages, the service) until it is killed; negative: never."""
        self.dies_with: list[Process] = []
        self.frozen_until_s = 0.0
        self.is_training = False
        self.outages: tuple[tuple[float, float], ...] = ()
        """Times between which it does not reach the coordination service, once it trains."""


class Task:
    """One thread of a simulated process."""

    __slots__ = (
        "ended",
        "greenlet",
        "local",
        "name",
        "number",
        "process",
        "state",
        "token",
        "woken",
    )

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.greenlet: greenlet | None = None
        self.state = READY
        self.token = 0
        self.woken = False
        self.ended = False
        self.local: dict[int, dict[str, Any]] = {}


class Scheduler:
    """Runs tasks in an order that ``seed`` decides. One per worker process at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.points = 0
        self.deaths = 0
        self.trace = seed & 0xFFFFFFFF
        self.current: Task | None = None
        self._hub = getcurrent()
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count(1)
        self._numbers = itertools.count(1)
        self.stay = 0.0
        """Probability that the running task goes on where another could run."""
        self.errors: list[tuple[Task, BaseException]] = []
        self.frames: Callable[[], None] | None = None

    # Tasks.

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """Make a task that runs ``work``; it begins at a later point."""
        task = Task(next(self._numbers), name, process)

        def body() -> None:
            try:
                work()
            except GreenletExit:
                pass
            except BaseException as error:  # noqa: BLE001 - judged by the world
                if process.alive:  # what unwinds a killed process may find its files closed
                    self.errors.append((task, error))
            finally:
                task.ended = True

        task.greenlet = greenlet(body, self._hub)
        process.tasks.append(task)
        self._ready.append(task)
        return task

    def here(self) -> Task:
        """Return the running task."""
        task = self.current
        assert task is not None, "called outside of the simulation"
        return task

    def note(self, value: int) -> None:
        """Make ``value`` part of the trace."""
        self.trace = (self.trace * 1000003 ^ value) & 0xFFFFFFFFFFFF

    # For the running task.

    def check(self) -> None:
        """Raise Killed in a task whose process was killed."""
        task = self.current
        if task is not None and not task.process.alive:
            raise Killed

    def point(self) -> None:
        """Let another task run, perhaps."""
        task = self.current
        if task is None:
            return
        if not task.process.alive:
            raise Killed
        if task.process.frozen_until_s > self.now_s:
            self.sleep(task.process.frozen_until_s - self.now_s)
            return
        ready = self._ready
        self.points += 1
        if not ready or self.random.random() < self.stay:
            return
        position = int(self.random.random() * (len(ready) + 1))
        if position == len(ready):
            return
        other = ready[position]
        process = other.process
        is_plain = process.alive and not other.ended and process.frozen_until_s <= self.now_s
        task.state = READY
        if not is_plain or not self.points & 1023:  # the hub looks at limits now and then
            ready.append(task)
            self._switch(task)
            return
        # Without the hub, which takes as long as most of what a thread does between two points.
        ready[position] = task
        self._begin(other)
        assert other.greenlet is not None
        other.greenlet.switch()
        self.current = task
        if not task.process.alive:
            raise Killed

    def call(self, latency_s: float = 0.0) -> None:
        """Count a call with an effect outside of the process; it may be its last."""
        task = self.current
        if task is None:
            return
        process = task.process
        if process.calls_left == 0 and process.alive:
            self.kill(process)
        elif process.calls_left > 0:
            process.calls_left -= 1
        if not process.alive:
            raise Killed
        if latency_s > 0:
            self.sleep(latency_s)
        else:
            self.point()

    def sleep(self, seconds: float) -> None:
        """Block for ``seconds`` of virtual time."""
        if self.current is None:
            return
        self.block(max(seconds, 0.0))

    def block(self, timeout_s: float | None) -> bool:
        """Block until ``wake`` or ``timeout_s``; return True when woken."""
        task = self.here()
        if not task.process.alive:
            raise Killed
        task.token += 1
        task.woken = False
        task.state = BLOCKED
        if timeout_s is not None:
            at_s = self.now_s + timeout_s
            heapq.heappush(self._timers, (at_s, next(self._order), task, task.token))
        self._switch(task)
        return task.woken

    def wait_among(self, waiters: list[Task], timeout_s: float | None) -> bool:
        """Block as one of ``waiters``, who are woken by others, or until ``timeout_s``."""
        task = self.here()
        waiters.append(task)
        try:
            return self.block(timeout_s)
        finally:
            if task in waiters:
                waiters.remove(task)

    def wake(self, task: Task) -> None:
        """End the ``block`` of ``task``; nothing happens when it has ended already."""
        if task.state != BLOCKED or task.ended or not task.process.alive:
            return
        task.woken = True
        task.state = READY
        task.token += 1  # its timer no longer counts
        self._ready.append(task)

    def _switch(self, task: Task) -> None:
        self._hub.switch()
        self.current = task
        if not task.process.alive:
            raise Killed

    # For the hub.

    def run(self, until: Callable[[], bool], limit_s: float, limit_points: int) -> None:
        """Run tasks until ``until()`` or until none is left; Stuck past a limit."""
        end_s, end_points = self.now_s + limit_s, self.points + limit_points
        choose = self.random.random
        ready = self._ready
        while not until():
            if not ready:
                if not self._advance(end_s):
                    return
                continue
            self.points += 1
            if self.points > end_points:
                raise Stuck(f"over {limit_points} points in one life: {self._waits()}")
            position = int(choose() * len(ready))
            task = ready[position]
            ready[position] = ready[-1]
            ready.pop()
            if task.ended or not task.process.alive:
                continue
            if task.process.frozen_until_s > self.now_s:
                self._delay(task, task.process.frozen_until_s)
                continue
            self._enter(task)

    def _delay(self, task: Task, until_s: float) -> None:
        task.token += 1
        task.state = DELAYED
        heapq.heappush(self._timers, (until_s, next(self._order), task, task.token))

    def _begin(self, task: Task) -> None:
        self.trace = (self.trace * 1000003 ^ task.number) & 0xFFFFFFFFFFFF
        self.current = task
        task.state = RUNNING

    def _enter(self, task: Task) -> None:
        self._begin(task)
        assert task.greenlet is not None
        task.greenlet.switch()
        # Perhaps another one than was entered: tasks switch to each other at points.
        last, self.current = self.current, None
        if last is not None and last.ended:
            last.greenlet = None

    def _advance(self, end_s: float) -> bool:
        while self._timers:
            at_s, _, task, token = heapq.heappop(self._timers)
            if token != task.token or task.ended or not task.process.alive:
                continue
            if at_s > end_s:
                raise Stuck(f"no end after {end_s - 1000.0:.0f} s: {self._waits()}")
            self.now_s = max(self.now_s, at_s)
            task.token += 1
            task.state = READY
            self._ready.append(task)
            # All that are due at this instant run in any order.
            while self._timers and self._timers[0][0] <= self.now_s:
                _, _, other, mark = heapq.heappop(self._timers)
                if mark == other.token and not other.ended and other.process.alive:
                    other.token += 1
                    other.state = READY
                    self._ready.append(other)
            return True
        return False

    def _waits(self) -> str:
        return f"virtual time {self.now_s - 1000.0:.1f} s, {len(self._ready)} ready"

    def kill(self, process: Process) -> None:
        """Kill a process: its threads never do anything again. ``reap`` unwinds them."""
        for each in (process, *process.dies_with):
            if each.alive:
                each.alive = False
                self.deaths += 1
                self.note(each.index + 7)

    def reap(self, process: Process) -> None:
        """Unwind the threads of a killed process and drop what they hold. From the hub."""
        assert not process.alive
        for task in process.tasks:
            if task.greenlet is not None and not task.ended:
                self.current = task
                while not task.greenlet.dead:
                    task.greenlet.throw(Killed)
                task.ended = True
            task.greenlet = None
            task.local.clear()
        self.current = None
        process.tasks.clear()
        process.globals.clear()
        self._ready = [task for task in self._ready if task.process is not process]
