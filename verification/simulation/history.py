"""One history: a job's lives on simulated hosts, with faults in them and between them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bucket
import devices
import network
import sim
import storage
import system
from hosts import Host
from judge import Judge, Seen, Violation
from loop import SECOND, Loop
from plan import Life, Plan
from scheduler import Process
from service import Client, Service

MOST_POINTS = 400_000
LONGEST_LIFE_S = 1500.0
MOST_KEYS_PER_PROCESS = 25


class History:
    """Runs the lives of a plan and judges each. ``verbose``: print what happens."""

    def __init__(self, plan: Plan, root: Path, *, verbose: bool = False) -> None:
        self.plan = plan
        self.verbose = verbose
        self.scheduler = sim.begin(plan.seed)
        storage.begin()
        bucket.begin(root)
        self.hosts = [Host(root, number) for number in range(plan.hosts)]
        self.pids = iter(range(100_000, 1_000_000))
        self.storage = root / "storage"
        self.judge = Judge(plan, self.hosts, self.storage, self.log)
        self.number = 0
        self._stalled: Process | None = None
        """A process of the life before this one that does not know that it is over."""
        self._has_other_writer = False

    def log(self, text: str) -> None:
        """Print a line of what happens."""
        if self.verbose:
            print(f"{self.scheduler.now_s - 1000:9.3f} {text}", flush=True)

    def run(self) -> int:
        """Run all lives; return the trace. Violation."""
        for number, life in enumerate(self.plan.lives, 1):
            self.number = number
            self.log(f"--- life {number}: {life}")
            self._between(life)
            self._has_other_writer = self._stalled is not None
            self.judge.before(number, life, has_other_writer=self._has_other_writer)
            seen = self._live(life)
            for task, error in self.scheduler.errors:
                raise Violation(
                    f"{task.name} ended with {type(error).__name__}: {error}"
                ) from error
            self.judge.after(seen)
        if self._stalled is not None:
            self._end(self._stalled)
        return self.scheduler.trace

    def _between(self, life: Life) -> None:
        stalled = self._stalled
        if stalled is not None and any(self.hosts[each] is stalled.host for each in life.hosts):
            self._end(stalled)
            self._stalled = None
        for number in life.wiped:
            self.hosts[number].wipe()
            self.judge.forget_host(number)
        for host, seconds in life.clocks:
            self._set_clock(host, seconds)
        for host, choice in life.flips:
            flipped = self.hosts[host].flip(choice)
            if flipped:
                self.log(f"flipped {flipped}")

    def _set_clock(self, host: int, ahead_s: float) -> None:
        self.hosts[host].clock_ahead_s = ahead_s
        self.log(f"the clock of host {host} is {ahead_s:+.0f} s ahead")

    def _live(self, life: Life) -> list[Seen]:
        scheduler = self.scheduler
        service = Service()
        rng = scheduler.random
        slow_s = life.service_slow_s
        loop = Loop(
            self.plan, life, self.number, self.judge, self.storage, self.log, verbose=self.verbose
        )
        service.delay = lambda: (0.01 if loop.is_healed else slow_s) * rng.random() ** 4
        service.fault = self._service_fault(life, loop)
        net = network.begin(self.number)
        net.fault = self._network_fault(life, loop)
        storage.behaviour.delay = lambda: life.storage_slow_s * rng.random() ** 4
        storage.behaviour.fault = self._storage_fault(life, loop)
        storage.behaviour.create_fault = self._create_fault(life, loop)
        storage.behaviour.listing_late_s = life.listing_late_s
        storage.behaviour.before = self._stall(life)
        stalled, self._stalled = self._stalled, None
        scheduler.stay = life.stay
        shape = devices.Shape(life.slices)
        processes: list[Process] = []
        for index in range(shape.count):
            host = self.hosts[life.hosts[index]]
            host.is_full = index in life.full
            process = Process(f"p{index}", index, host)
            process.pid = next(self.pids)
            process.globals.update(client=Client(service), shape=shape)
            process.outages = tuple((a, b) for p, a, b in life.outages if p == index)
            process.calls_left = dict(life.killed_at_call).get(index, -1)
            processes.append(process)
            scheduler.spawn(process, f"main {index}", lambda p=process: loop.run(p))
        if life.takes_others:
            for process in processes:
                process.dies_with = self._together(life, processes)
        try:
            self._supervise(life, processes, loop, service)
        finally:
            if stalled is not None:
                stalled.host.changed()
                self._end(stalled)
            for process in processes:
                if process.alive and process is not self._stalled:
                    scheduler.kill(process)
            for process in processes:
                if process is not self._stalled:
                    net.drop(process)
                    scheduler.reap(process)
            service.gone = True
            net.forget_all_but(self._stalled)
            gc.collect()
            system.close_folders_of_the_dead()
        limit = MOST_KEYS_PER_PROCESS * shape.count + 60
        if service.most_keys > limit:
            raise Violation(f"{service.most_keys} keys in the coordination service, over {limit}")
        return loop.seen

    def _end(self, process: Process) -> None:
        if process.alive:
            self.scheduler.kill(process)
        network.network.drop(process)
        self.scheduler.reap(process)

    def _stall(self, life: Life) -> Callable[[str], None]:
        """Return what lets a process stall before a call of storage, as the plan says."""
        if not life.stalls:
            return lambda what: None
        index, kind, number, seconds = life.stalls
        left = [number]

        def before(what: str) -> None:
            process = self.scheduler.here().process
            if what != kind or process.index != index or not process.is_training or not left[0]:
                return
            left[0] -= 1
            if not left[0]:
                self.log(f"{process.name} stalls before a {what} of storage for {seconds:.1f} s")
                process.frozen_until_s = self.scheduler.now_s + seconds
                self._stalled = process

        return before

    def _supervise(
        self, life: Life, processes: list[Process], loop: Loop, service: Service
    ) -> None:
        """Run until all have ended, or until the supervisor has noticed a death."""
        scheduler = self.scheduler
        deaths = scheduler.deaths

        def is_over() -> bool:
            return loop.left == 0 or scheduler.deaths > deaths or self._stalled is not None

        if life.killed_all_after_s:
            self._kill_later(life, processes)
        for host, at_s, ahead_s in life.clock_jumps:
            self._later("clock", at_s, lambda h=host, s=ahead_s: self._set_clock(h, s))
        scheduler.run(lambda: is_over() or loop.is_between, LONGEST_LIFE_S, MOST_POINTS)
        if loop.is_between and not is_over():
            self.log(f"--- life {self.number}, second restore")
            self.judge.after(loop.seen)
            self.judge.before(
                self.number + SECOND, life.rest, has_other_writer=self._has_other_writer
            )
            loop.go_on(self.number + SECOND)
            if not self.judge.is_expected:
                return  # a restore that finds nothing begins no life
            scheduler.run(is_over, LONGEST_LIFE_S, MOST_POINTS)
        if loop.left == 0:
            return
        dead = [process for process in processes if not process.alive]
        if not dead and self._stalled is None:
            raise Violation("nothing runs and nothing waits: a wait without an end")
        for process in dead:
            self.log(f"{process.name} was killed")
            network.network.drop(process)
        if any(process.index == 0 for process in dead):
            service.gone = True
        end_s = scheduler.now_s + life.noticed_after_s
        waker = Process("supervisor", 99, self.hosts[0])
        scheduler.spawn(waker, "supervisor", lambda: scheduler.sleep(life.noticed_after_s))
        scheduler.run(lambda: scheduler.now_s >= end_s, LONGEST_LIFE_S, MOST_POINTS)

    def _kill_later(self, life: Life, processes: list[Process]) -> None:
        def kill() -> None:
            for process in self._together(life, processes):
                self.scheduler.kill(process)

        self._later("killer", life.killed_all_after_s, kill)

    def _later(self, name: str, at_s: float, act: Callable[[], None]) -> None:
        """Act ``at_s`` seconds into the life that begins, unless it has ended."""
        number = self.number

        def wait() -> None:
            self.scheduler.sleep(at_s)
            if self.number == number:
                act()

        self.scheduler.spawn(Process(name, 98, self.hosts[0]), name, wait)

    def _together(self, life: Life, processes: list[Process]) -> list[Process]:
        """Return the processes that are killed at one moment."""
        named = life.killed_together
        return [process for process in processes if not named or process.index in named]

    def _service_fault(self, life: Life, loop: Loop) -> Any:
        rng = self.scheduler.random
        lost = life.service_lost

        def fault(operation: str, key: str) -> str:
            del operation, key
            if loop.is_healed:
                return ""
            process = self.scheduler.here().process
            if process.is_training and any(
                begin_s <= self.scheduler.now_s < end_s for begin_s, end_s in process.outages
            ):
                return "lost"
            if not lost or rng.random() >= lost:
                return ""
            return "lost" if rng.random() < 0.5 else "unheard"

        return fault

    def _storage_fault(self, life: Life, loop: Loop) -> Any:
        rng = self.scheduler.random

        def fault() -> str:
            if loop.is_healed:
                return ""
            if life.storage_gone:
                return "lost"
            if not life.storage_faults or rng.random() >= life.storage_faults:
                return ""
            return rng.choice(("lost", "lost", "unheard", "full"))

        return fault

    def _create_fault(self, life: Life, loop: Loop) -> Any:
        rng = self.scheduler.random

        def fault() -> str:
            if not life.creates_unheard or loop.is_healed:
                return ""
            return "unheard" if rng.random() < life.creates_unheard else ""

        return fault

    def _network_fault(self, life: Life, loop: Loop) -> Any:
        rng = self.scheduler.random
        chance = life.network_faults

        def fault(_sock: Any) -> str:
            if not chance or loop.is_healed or rng.random() >= chance:
                return ""
            return rng.choice(("reset", "reset", "silent", "slow"))

        return fault
