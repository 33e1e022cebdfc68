"""One job of a soak: its directories, its lives, and what is left of them."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from soak_damage import Rest
from soak_faults import Place, Trouble, clock_error_s, instruct
from soak_life import RunningLife
from soak_looks import (
    BucketStore,
    DirectoryStore,
    RamLook,
    Save,
    StoreLook,
    look_at_ram,
    look_at_storage,
)
from soak_oracle import Bounds, Life, bounds, doubt_lives_from_nothing
from soak_plan import ENDINGS, MAX_HOSTS, Fault, Incident, Job, clock_of
from soak_program import Order

from emergency_ckpt.tools.launch.process_set import ReservedPort

HANG_S = 150.0
"""Longer than all deadlines of the job's settings together: what takes longer hangs."""
ATTEMPTS = 3
_SETTINGS = {
    "total_timeout_s": 30.0,
    "start_timeout_s": 40.0,
    "save_timeout_s": 10.0,
    "transfer_timeout_s": 2.0,
    "storage_wait_timeout_s": 2.0,
    "preemption_grace_s": 15.0,
}


@dataclasses.dataclass
class Site:
    """Where the jobs of a lane live: mounts for hosts and storage, and the bucket's server."""

    root: Path
    control: Any
    environ: dict[str, str]
    is_mounted: bool

    def host(self, number: int) -> Path:
        return self.root / "hosts" / f"host_{number}"

    @property
    def storage(self) -> Path:
        return self.root / "storage" / "steps"


class Looks(NamedTuple):
    """What ramdisks and storage hold, and what must come back of it."""

    ram: RamLook
    storage: StoreLook
    bounds: Bounds


class JobRun:
    """One job: where it is, which of its lives runs, and what the oracle knows of those before."""

    def __init__(self, site: Site, seed: int, job: Job, put_back: tuple[str, ...] = ()) -> None:
        self.site, self.seed, self.job, self._put_back = site, seed, job, put_back
        self._fresh = 0
        self.life: RunningLife | None = None

    # Directories

    def begin(self) -> None:
        """New directories, and the first life in them."""
        site, job = self.site, self.job
        self._fresh += 1
        self.run_id = f"job{job.number}.{self._fresh}"
        self.scratch = site.root / "scratch" / self.run_id
        self.scratch.mkdir(parents=True)
        for host in range(MAX_HOSTS):
            _empty(site.host(host))
        _empty(site.storage.parent)
        store, place = None, None
        if job.storage == "directory":
            store, place = DirectoryStore(site.storage), Place(None, "", site.storage)
        elif job.storage == "bucket":
            store = BucketStore(site.control, "bucket", self.run_id)
            place = Place(site.control, self.run_id, None)
        self.place = place
        self.rest = Rest({h: site.host(h) for h in range(MAX_HOSTS)}, self.run_id, store)
        self.lives: dict[int, Life] = {}
        self.incarnations: dict[str, int] = {}
        self.newest = 0
        self.shape, self.hosts = job.shape, list(range(job.shape[0] * job.shape[1]))
        self.secret = hashlib.sha256(f"{self.seed}-{self.run_id}".encode()).hexdigest()

    def close(self) -> None:
        if self.life is not None:
            self.life.end()
        if self.place is not None:
            self.place.mend()
        if isinstance(self.rest.store, BucketStore):
            for name in self.rest.store.names():
                self.rest.store.remove(name)
        shutil.rmtree(self.scratch)

    # Lives

    def start(self, restore: list[Fault], after: Incident) -> None:
        """Start a life with the faults of its restore and those of its end that it must know."""
        job, count = self.job, len(self.hosts)
        number = len(self.lives)
        self.lives[number] = Life(number, None, count)
        port = ReservedPort()
        ends = "good_end" in after.kinds
        plain = Order(
            address=port.address,
            process=0,
            count=count,
            slices=self.shape[0],
            devices=job.devices,
            life=number,
            journal=Path(),
            settled=self.scratch / f"settled_{number:03d}",
            settings={},
            steps=after.steps,
            ends=ends,
            put_back=self._put_back,
            environ=self.site.environ | {self._secret_name: self.secret},
        )
        for fault in restore:
            if fault.kind == "no_restore":
                after_step = 0 if fault.text == "zero" else self.newest + 5
                plain = dataclasses.replace(plain, goes_on_after=after_step)
                self.lives[number].is_from_nothing = True
        orders = [self._order(plain, process) for process in range(count)]
        for fault in [*restore, *after.of("life")]:
            instruct(orders, fault, after.steps)
        self.trouble = Trouble(self.rest.hosts, self.run_id, self.place)
        self.life = RunningLife(orders, self.scratch, port)

    @property
    def _secret_name(self) -> str:
        return "ECKPT_SECRET" if self.job.secret_is_given else "ECKPT_JOB_SECRET"

    def _order(self, plain: Order, process: int) -> Order:
        directory = {"none": None, "directory": str(self.site.storage)}.get(
            self.job.storage, f"gs://bucket/{self.run_id}"
        )
        settings = {
            **_SETTINGS,
            **self.job.settings,
            "run_id": self.run_id,
            "local_dir": str(self.site.host(self.hosts[process])),
            "dir": directory,
        }
        journal = self.scratch / f"journal_{plain.life:03d}_{process}"
        clock = clock_of(self.seed, self.job.number, plain.life, self.hosts[process])
        return dataclasses.replace(
            plain,
            process=process,
            settings=settings,
            journal=journal,
            clock_s=clock.ahead_s,
            clock_jump=clock.jump,
        )

    def begun(self) -> list[str]:
        """Wait until the running life has restored everywhere, as one does that may; problems."""
        life = self.life
        assert life is not None
        if not life.wait(life.is_settled, HANG_S):
            life.dump_stacks()
            return [f"hang: {life.running} do not start"]
        if life.noted("restored") != set(range(len(life.pids))):
            errors = {f"{e['error']}: {e['text']}" for _, e in life.notes("process.raised")}
            return [f"error at the start: {'; '.join(errors) or life.statuses}"]
        life.orders[0].settled.touch()
        return []

    def finish(self, incident: Incident) -> list[str]:
        """Let the running life meet the faults of ``incident`` until it has ended; its problems."""
        life, count = self.life, len(self.hosts)
        assert life is not None
        problems: list[str] = []
        faults = incident.of("life")
        ending = next((f for f in faults if f.kind in ENDINGS), None)
        for fault in sorted(faults, key=lambda f: f.numbers[0]):
            if fault.kind in ENDINGS or fault.kind in {"kill_at_event", "clock_jump"}:
                continue
            self._reach(incident.steps * fault.numbers[0])
            self.trouble.happen(life, fault, self.hosts)
        for fault in faults:
            if fault.kind == "kill_at_event":
                self._reach(incident.steps)
                life.wait(lambda: bool(life.statuses), 0.5)
                self.trouble.note(fault, fault.text if life.notes("killed_itself") else "")
            if fault.kind == "clock_jump":
                self.trouble.note(fault, f"{clock_error_s(fault):.0f} s")
        if ending is not None:
            problems += self._end(ending, incident, count)
        life.end()
        life.poll()
        self.learn()
        return problems

    def _reach(self, steps: float) -> None:
        life = self.life
        assert life is not None
        life.wait(lambda: life.trained >= steps or bool(life.statuses), 30.0)

    def _end(self, ending: Fault, incident: Incident, count: int) -> list[str]:
        life = self.life
        assert life is not None
        processes = ending.some(1, count)
        pause_s = ending.numbers[2] ** 2
        if ending.kind not in {"good_end", "exception"}:
            self._reach(incident.steps * ending.numbers[0])
            time.sleep(0.05 * ending.numbers[3])
        self.trouble.note(ending, f"{processes}")
        match ending.kind:
            case "kill_all":
                processes = list(range(count))
                life.signal(processes, signal.SIGKILL)
                self.trouble.note(ending, f"after {life.trained} steps")
            case "kill_some":
                life.signal(processes, signal.SIGKILL)
                time.sleep(pause_s)
            case "abort":
                life.signal(processes, signal.SIGABRT)
                time.sleep(pause_s)
            case "hang":
                life.signal(processes, signal.SIGSTOP)
                time.sleep(pause_s)
            case "exception":
                life.wait(lambda: bool(life.noted("process.raised") or life.statuses), HANG_S)
                time.sleep(pause_s)
            case "notice":
                life.signal(processes, signal.SIGTERM)
                return self._await_end()
            case "good_end":
                return self._await_end()
            case _:
                raise AssertionError(ending.kind)
        return []

    def _await_end(self) -> list[str]:
        """Wait until all have left, or one was killed by another fault."""
        life = self.life
        assert life is not None
        if life.wait(
            lambda: not life.running or min(life.statuses.values(), default=0) < 0, HANG_S
        ):
            return []
        life.dump_stacks()
        return [f"hang: {life.running} did not end"]

    def learn(self) -> None:
        """Take from the journals what the oracle knows of the life that has ended."""
        life = self.life
        assert life is not None
        number = life.orders[0].life
        mine = self.lives[number]
        for _, line in life.notes("save.started"):
            self.incarnations[line["inc"].partition(".")[0]] = number
        for _, line in life.notes("restored"):
            if line["step"] is not None:
                mine.parent = Save(line["step"], line["life"])
        whole = life.steps_of("save.complete") | life.steps_of("persistent.complete")
        if life.notes("save.started"):
            mine.has_saved(len(whole))
        self.newest = max([self.newest, *life.steps_of("trained")])

    # Looks

    def looks(self, *, storage: bool = True) -> Looks:
        """What the hosts of the next life and storage hold, and what must come back of it."""
        hosts = {host: self.site.host(host) for host in self.hosts}
        damaged, knew = self.rest.damaged, self.rest.knew
        ram = look_at_ram(hosts, self.run_id, self.incarnations, damaged, knew)
        stored = StoreLook(set(), known=False)
        if self.rest.store is not None and storage:
            stored = look_at_storage(self.rest.store, self.incarnations, self.rest.damaged)
        whole = ram.whole | stored.whole
        if storage or self.rest.store is None:
            doubt_lives_from_nothing(self.lives, whole)
        return Looks(ram, stored, bounds(self.lives, whole))

    def kept_promises(self) -> list[str]:
        """What processes said was whole when the life ended must be whole then."""
        life, trouble = self.life, self.trouble
        assert life is not None
        ram, stored, _ = self.looks()
        number = life.orders[0].life
        problems: list[str] = []
        said = life.steps_of("save.complete")
        promised = min((line["copies"] for _, line in life.notes("start.ready")), default=1)
        if said and not trouble.ram_hit:
            kept = {
                s: held for s, held in ram.held.items() if s.step >= max(said) and held.is_complete
            }
            if not kept:
                problems.append(f"lost: step {max(said)} of life {number} was complete in RAM")
            elif max(held.copies() for held in kept.values()) < promised:
                problems.append(f"too few copies: of step {max(said)}, {promised} promised")
        said = life.steps_of("persistent.complete")
        if said and not trouble.storage_hit and not any(s.step >= max(said) for s in stored.whole):
            problems.append(f"lost: step {max(said)} of life {number} was complete in storage")
        counts = [sum(line["e"] == "trained" for line in lines) for lines in life.journals]
        every = self.job.settings["local_save_every"]
        quiet = not (trouble.ram_hit or trouble.storage_hit)
        if quiet and min(counts) > 2 * every + 2 and not life.notes("save.complete"):
            problems.append(f"saves stopped: none complete in {min(counts)} steps of life {number}")
        return problems


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
