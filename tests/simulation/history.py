"""One history: a job's lives on simulated hosts, with faults in them and between them."""

# pyright: basic
# It stands for modules whose parts have no types of their own.

from __future__ import annotations

import gc
import shutil
import traceback
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import devices
import install
import network
import oracle
import sim
import storage
from plan import Life, Plan
from scheduler import Killed, Process, Stuck
from service import Client, Service

RUN = "run"
MOST_POINTS = 400_000
LONGEST_LIFE_S = 1500.0
MOST_KEYS_PER_PROCESS = 40
MOST_FILES_PER_HOST = 400


class Violation(AssertionError):
    """An invariant does not hold."""


class Host:
    """A machine: its ramdisk, its clock, its address."""

    def __init__(self, root: Path, number: int) -> None:
        self.name = f"host-{number}"
        self.address = f"10.0.0.{number + 1}"
        self.ram = root / self.name
        self.ram.mkdir(parents=True, mode=0o700)
        self.is_full = False
        self.is_damaged = False
        self.clock_ahead_s = 0.0

    def wipe(self) -> None:
        """Lose all RAM."""
        shutil.rmtree(self.ram)
        self.ram.mkdir(mode=0o700)
        self.is_damaged = False


@dataclass
class Seen:
    """What one process did in one life."""

    restored: tuple[int, int] | None = None
    """(tag, step), or None while not restored."""
    returned: bool = False
    ended: bool = False
    error: BaseException | None = None
    complete: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


class History:
    """Runs the lives of a plan and judges each. ``log``: lines of what happened, if wanted."""

    def __init__(self, plan: Plan, root: Path, *, verbose: bool = False) -> None:
        self.plan = plan
        self.root = root
        self.verbose = verbose
        self.scheduler = sim.begin(plan.seed)
        self.hosts = [Host(root, number) for number in range(plan.hosts)]
        self.tags: dict[str, int] = {}
        """Incarnation -> the life that had it, whose number is in the bytes that it saves."""
        self.timelines: list[dict[str, Any]] = []
        self.saved_by_tag: dict[int, set[int]] = {}
        self.pids = iter(range(100_000, 1_000_000))
        self.dead: dict[tuple[int, int], set[int]] = {}
        """(tag, step) of a save that was rolled back -> the lives that did."""
        self.bound: dict[int, set[int]] = {}
        """Life -> hosts whose RAM has its record of what was rolled back."""
        self.storage = root / "storage"
        self.expected: oracle.Save | None = None
        self.number = 0

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
            seen = self._live(life)
            self._judge(life, seen)
        return self.scheduler.trace

    # Between two lives.

    def _between(self, life: Life) -> None:
        for number in life.wiped:
            self.hosts[number].wipe()
            for bound in self.bound.values():
                bound.discard(number)
        for host, seconds in life.clocks:
            self.hosts[host].clock_ahead_s += seconds
        for host, choice in life.flips:
            self._flip(self.hosts[host], choice)
        used = [self.hosts[number].ram for number in life.hosts]
        self.found = oracle.survey(used, self.tags)
        stored = []
        if not life.storage_faults and not life.storage_gone:
            stored = oracle.stored_saves(self.storage, self.tags)
        self.expected = oracle.newest_whole(self.found, self.timelines, stored)
        self.log(f"expected at least {self.expected}")

    def _flip(self, host: Host, choice: float) -> None:
        slots = sorted(host.ram.rglob("slot_*.bin"))
        files = sorted(path for path in host.ram.rglob("*.json") if path.stat().st_size)
        files = files if choice * 1009 % 1 < 0.25 or not slots else slots
        if not files:
            return
        host.is_damaged = True
        path = files[int(choice * len(files))]
        data = bytearray(path.read_bytes())
        limit = min(len(data), 150)  # most of a slot's page is unused
        place = int(choice * 7919 * limit) % limit
        data[place] ^= 1 << int(choice * 8191) % 8
        with path.open("r+b") as file:
            file.write(data)
        self.log(f"flipped a bit of {path.name} at {place} on {host.name}")

    # One life.

    def _live(self, life: Life) -> list[Seen]:
        scheduler = self.scheduler
        service = Service()
        rng = scheduler.random
        slow_s = life.service_slow_s
        service.delay = lambda: slow_s * rng.random() ** 4 if slow_s else 0.0
        service.fault = self._service_fault(life)
        net = network.begin()
        net.fault = self._network_fault(life)
        storage.behaviour.delay = lambda: life.storage_slow_s * rng.random() ** 4
        storage.behaviour.fault = self._storage_fault(life)
        scheduler.stay = life.stay
        shape = devices.Shape(life.slices)
        processes: list[Process] = []
        seen = [Seen() for _ in range(shape.count)]
        for index in range(shape.count):
            host = self.hosts[life.hosts[index]]
            host.is_full = index in life.full
            process = Process(f"p{index}", index, host)
            process.pid = next(self.pids)
            process.globals.update(client=Client(service), shape=shape)
            process.outages = tuple((a, b) for p, a, b in life.outages if p == index)
            process.calls_left = dict(life.killed_at_call).get(index, -1)
            processes.append(process)
            scheduler.spawn(
                process, f"main {index}", lambda p=process, i=index: self._main(life, p, seen[i])
            )
        try:
            self._supervise(life, processes, seen, service)
        finally:
            for process in processes:
                if process.alive:
                    scheduler.kill(process)
            for process in processes:
                net.drop(process)
                scheduler.reap(process)
            service.gone = True
            net.by_fd.clear()
            gc.collect()
        limit = MOST_KEYS_PER_PROCESS * shape.count + 60
        if service.most_keys > limit:
            raise Violation(f"{service.most_keys} keys in the coordination service, over {limit}")
        return seen

    def _supervise(
        self, life: Life, processes: list[Process], seen: list[Seen], service: Service
    ) -> None:
        """Run until all have ended, or until the supervisor has noticed a death."""
        scheduler = self.scheduler

        def is_over() -> bool:
            return all(each.ended for each in seen) or not all(p.alive for p in processes)

        if life.killed_all_after_s:
            self._kill_later(life, processes)
        scheduler.run(is_over, LONGEST_LIFE_S, MOST_POINTS)
        if all(each.ended for each in seen):
            return
        dead = [process for process in processes if not process.alive]
        if not dead:
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
        scheduler = self.scheduler
        waker = Process("killer", 98, self.hosts[0])

        def kill() -> None:
            scheduler.sleep(life.killed_all_after_s)
            for process in processes:
                if process.index in life.killed_together or not life.killed_together:
                    scheduler.kill(process)

        scheduler.spawn(waker, "killer", kill)

    def _service_fault(self, life: Life) -> Any:
        rng = self.scheduler.random
        lost = life.service_lost

        def fault(operation: str, key: str) -> str:
            del operation, key
            process = self.scheduler.here().process
            if process.is_training and any(
                begin_s <= self.scheduler.now_s < end_s for begin_s, end_s in process.outages
            ):
                return "lost"
            if not lost or rng.random() >= lost:
                return ""
            return "lost" if rng.random() < 0.5 else "unheard"

        return fault

    def _storage_fault(self, life: Life) -> Any:
        rng = self.scheduler.random

        def fault() -> str:
            if life.storage_gone:
                return "lost"
            if not life.storage_faults or rng.random() >= life.storage_faults:
                return ""
            return rng.choice(("lost", "lost", "unheard", "full"))

        return fault

    def _network_fault(self, life: Life) -> Any:
        rng = self.scheduler.random
        chance = life.network_faults

        def fault(_sock: Any) -> str:
            if not chance or rng.random() >= chance:
                return ""
            return rng.choice(("reset", "reset", "silent", "slow"))

        return fault

    # One process.

    def _main(self, life: Life, process: Process, seen: Seen) -> None:
        try:
            self._train(life, process, seen)
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - judged
            seen.error = _without_frames(error)
            self.log(f"{process.name} raised {type(error).__name__}: {str(error)[:300]}")
        seen.ended = True

    def _train(self, life: Life, process: Process, seen: Seen) -> None:
        product = install.product()
        me, shape = process.index, process.globals["shape"]
        scheduler = self.scheduler
        checkpointer = product.EmergencyCheckpointer(
            run_id=RUN,
            local_dir=str(process.host.ram),
            bind_host=process.host.address,
            local_save_every_n_steps=life.interval,
            dir=str(self.storage) if self.plan.stored_every else None,
            save_every_n_steps=self.plan.stored_every,
            keep_last_n=2 if self.plan.stored_every else None,
            persistent_timeout_s=30.0,
            storage_wait_timeout_s=1.0,
            local_keep_last_n=self.plan.keep_last_n,
            placement=self.plan.placement,
            save_on_preemption=False,
            copy_threads=1,
            copy_batch_bytes=200,
            save_niceness=0,
            event_log="off",
            start_timeout_s=60.0,
            save_timeout_s=10.0,
            restore_timeout_s=60.0,
            transfer_timeout_s=5.0,
            host_state_remap=lambda payloads, index, count: {**payloads[0], "me": index},
            on_event=lambda event: self._on_event(process, seen, event),
        )
        start = devices.state(shape, me, 0, 0)
        host = {"tag": 0, "step": 0, "me": me}
        step, state = checkpointer.restore(state=start, host_state=host)
        seen.returned = True
        process.outages = tuple(
            (scheduler.now_s + begin_s, scheduler.now_s + begin_s + length_s)
            for begin_s, length_s in process.outages
        )
        process.is_training = True
        if step is not None:
            seen.restored = self._check_restored(process, state, host, step)
            self.log(f"{process.name} restored step {step} of life {seen.restored[0]}")
        del state
        first = 0 if step is None else step
        tag = self.number
        for number in range(first + 1, first + life.steps + 1):
            scheduler.sleep(life.step_s * (0.5 + scheduler.random.random()))
            if process.host.is_full and number == first + 3:
                process.host.is_full = False
            self._save(checkpointer, process, shape, tag, number, life)
        if life.ends_well:
            checkpointer.stop()
        else:
            scheduler.sleep(life.step_s * 4)

    def _save(
        self, checkpointer: Any, process: Process, shape: Any, tag: int, step: int, life: Life
    ) -> None:
        self.saved_by_tag.setdefault(tag, set()).add(step)
        checkpointer.save(
            step=step,
            state=devices.state(shape, process.index, tag, step),
            host_state={"tag": tag, "step": step, "me": process.index},
        )
        if life.waits:
            checkpointer.wait_until_finished()

    def _check_restored(
        self, process: Process, state: Any, host: Any, step: int
    ) -> tuple[int, int]:
        tag = int(state["n"].local) - step * 1000
        if step not in self.saved_by_tag.get(tag, ()):
            raise Violation(
                f"{process.name} restored step {step} of life {tag}, which was never saved"
            )
        truth = devices.state(process.globals["shape"], process.index, tag, step)
        for name, value in truth.items():
            if value.local.tobytes() != state[name].local.tobytes():
                raise Violation(
                    f"{process.name} restored other bytes of {name} than life {tag} saved"
                )
        wanted = {"tag": tag, "step": step, "me": process.index}
        if host != wanted:
            raise Violation(f"{process.name} restored the host state {host}, not {wanted}")
        return tag, step

    def _on_event(self, process: Process, seen: Seen, event: Any) -> None:
        fields = event.fields
        self.scheduler.note(zlib.crc32(event.name.encode()) ^ int(fields.get("step") or 0))
        if self.verbose:
            text = ", ".join(f"{key}={value}" for key, value in fields.items())
            self.log(f"{process.name} {event.name} {text[:300]}")
        incarnation = event.origin.incarnation
        if incarnation:
            self.tags.setdefault(incarnation, self.number)
        if event.name == "persistent.complete":
            seen.stored.append(int(fields["step"]))
        if event.name == "save.complete":
            seen.complete.append(int(fields["step"]))

    # Judgement.

    def _judge(self, life: Life, seen: list[Seen]) -> None:
        for task, error in self.scheduler.errors:
            raise Violation(f"{task.name} ended with {type(error).__name__}: {error}") from error
        for each in seen:
            if isinstance(each.error, Violation | Stuck):
                raise each.error
            if each.error is not None and type(each.error).__module__ != "emergency_ckpt.errors":
                raise Violation(f"an untyped error: {each.error!r}") from each.error
        restored = {each.restored for each in seen if each.returned}
        if len(restored) > 1:
            raise Violation(f"processes restored different steps: {restored}")
        if restored:
            self._judge_step(next(iter(restored)))
        errors = [each.error for each in seen if each.error is not None]
        kinds = {type(error).__name__ for error in errors}
        is_lost = self.expected is None and kinds <= {"Unrecoverable", "RestoreFailed"}
        if errors and life.is_calm and not is_lost:
            raise Violation(f"an error without a fault: {errors[0]}") from errors[0]
        self._judge_ramdisks(life, seen)

    def _judge_step(self, restored: tuple[int, int] | None) -> None:
        for killer in self.dead.get(restored or (0, 0), ()):
            if self.bound[killer] & set(self.plan.lives[self.number - 1].hosts):
                raise Violation(f"restored {restored}, which life {killer} had rolled back")
        if self.expected is None:
            return
        if restored is None:
            raise Violation(f"nothing was restored, although {self.expected} is whole")
        if restored[1] < self.expected[1]:
            raise Violation(f"restored step {restored[1]}, although {self.expected} is whole")
        saves = [(life, restored[1]) for life, tag in self.tags.items() if tag == restored[0]]
        if all(oracle.is_rolled_back(save, self.found) for save in saves):
            raise Violation(f"restored {saves}, which was rolled back")

    def _note_rolled_back(self, life: Life, seen: list[Seen]) -> None:
        """Remember the saves that this life's first complete save has put out of the way."""
        bound = {life.hosts[number] for number, each in enumerate(seen) if each.complete}
        restored = next((each.restored for each in seen if each.returned), None)
        if not bound or restored is None:
            return
        self.bound[self.number] = bound
        for tag, steps in self.saved_by_tag.items():
            for step in steps:
                if tag != self.number and (tag, step) != restored and step >= restored[1]:
                    self.dead.setdefault((tag, step), set()).add(self.number)

    def _judge_ramdisks(self, life: Life, seen: list[Seen]) -> None:
        every = oracle.survey([host.ram for host in self.hosts], self.tags)
        if every.wrong:
            raise Violation(every.wrong[0])
        sound = [host.ram for host in self.hosts if not host.is_damaged]
        for path in every.torn:
            if any(ram in path.parents for ram in sound):
                raise Violation(f"{path} was published with other bytes than its CRCs")
        if every.most_slots > self.plan.keep_last_n + 3:
            raise Violation(f"{every.most_slots} slots in one directory")
        if every.files > MOST_FILES_PER_HOST * len(self.hosts):
            raise Violation(f"{every.files} files in RAM")
        self.timelines = _distinct(self.timelines + every.timelines)
        self._note_rolled_back(life, seen)
        complete = max((step for each in seen for step in each.complete), default=None)
        whole = oracle.whole_saves(every)
        mine = [save for save in whole if self.tags.get(save[0]) == self.number]
        self.log(f"whole in RAM: {whole}; complete: {complete}")
        if complete is not None and (not mine or mine[-1][1] < complete):
            raise Violation(f"step {complete} was complete, and is no longer whole: {whole}")
        stored = max((step for each in seen for step in each.stored), default=None)
        there = oracle.stored_saves(self.storage, self.tags)
        self.log(f"whole in storage: {there}; complete: {stored}")
        mine_there = [step for life, step in there if self.tags[life] == self.number]
        if stored is not None and max(mine_there, default=-1) < stored:
            raise Violation(f"step {stored} was complete in storage, and is not: {there}")
        if complete is not None and life.is_calm:
            newest = next(save for save in mine if save[1] == complete)
            self._judge_copies(life, every, newest)

    def _judge_copies(self, life: Life, every: oracle.Holdings, save: oracle.Save) -> None:
        """After a life without faults its newest save has as many copies as was asked for."""
        slices = len(life.slices)
        wanted = slices if slices <= 2 else slices - 1
        if self.plan.placement != "all_but_primary":
            wanted = min(2, slices)
        elements, states = oracle.copies(every, save)
        if elements < wanted or states < slices:
            raise Violation(f"{save} has {elements} copies of a shard and {states} of a host state")


def _without_frames(error: BaseException) -> BaseException:
    """Return ``error``, which then holds nothing of the process that raised it."""
    left: list[BaseException | None] = [error]
    done: set[int] = set()
    text = "".join(traceback.format_exception(error))
    while left:
        part = left.pop()
        if part is None or id(part) in done:
            continue
        done.add(id(part))
        left += [part.__cause__, part.__context__]
        part.__traceback__ = None
    error.add_note(text)
    return error


def _distinct(timelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({repr(each): each for each in timelines}.values())
