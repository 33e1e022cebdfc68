"""Runs the incidents of a job one after the other, and records each."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from soak_damage import DAMAGES
from soak_job import HANG_S, JobRun
from soak_looks import Save
from soak_oracle import is_refusal, problems_of, result_of
from soak_plan import MAX_HOSTS, SHAPES, Fault, Incident
from soak_summary import RIGHT

ATTEMPTS = 3


class Expected(NamedTuple):
    """What must come back: the least step, and whether anybody knew of one; also of RAM alone."""

    with_storage: int | None
    of_ram: int | None
    is_known: bool
    is_known_in_ram: bool

    def least(self, storage_hit: bool) -> int | None:
        if not storage_hit or self.with_storage is None or self.of_ram is None:
            return None if storage_hit else self.with_storage
        return min(self.with_storage, self.of_ram)

    def known(self, storage_hit: bool) -> bool:
        return self.is_known_in_ram if storage_hit else self.is_known

    def is_right_refusal(self, errors: Sequence[str]) -> bool:
        """Whether a start without faults may end in these errors."""
        return self.with_storage is None and is_refusal(errors)


class Incidents:
    """The incidents of one job. ``record``: called with the line of each."""

    def __init__(self, run: JobRun, record: Callable[[dict[str, Any]], None]) -> None:
        self._run, self._record = run, record

    def run(self, until_s: float, only: int | None = None) -> None:
        """All incidents of the job in order, until ``until_s`` of the monotonic clock."""
        self._run.begin()
        first, *_ = self._run.job.incidents
        self._run.start([], first)
        follows = [*self._run.job.incidents[1:], self._run.job.incidents[-1]]
        for incident, after in zip(self._run.job.incidents, follows, strict=True):
            line = self.meet(incident, after)
            self._record(line)
            if line["result"] not in RIGHT:
                self._keep(line)
            if line["result"] not in {"recovered", "begun anew"}:
                self._run.close()
                self._run.life = None
                self._run.begin()
                self._run.start([], after)
            if time.monotonic() > until_s or incident.number == only:
                break
        self._run.close()

    def _keep(self, line: dict[str, Any]) -> None:
        """Keep journals, logs and ramdisks of a failure."""
        kept = self._run.site.root / "failures" / f"incident_{line['incident']}"
        shutil.copytree(self._run.scratch, kept / "lives", dirs_exist_ok=True)
        for host in range(MAX_HOSTS):
            run = self._run.site.host(host) / self._run.run_id
            if run.is_dir():
                shutil.copytree(run, kept / f"host_{host}", symlinks=True, ignore=_pipes)
        if self._run.site.storage.is_dir():
            shutil.copytree(self._run.site.storage, kept / "storage", ignore=_pipes)

    def meet(self, incident: Incident, after: Incident) -> dict[str, Any]:
        """End the running life as ``incident`` says, do the rest of it, and see it recovered."""
        assert self._run.life is not None
        shape = self._run.shape
        problems = self._run.begun() or self._run.finish(incident)
        did = dict(self._run.trouble.did)
        problems += self._run.kept_promises()
        self._run.trouble.mend()
        self._run.rest.note_known()
        for fault in incident.of("rest"):
            did[fault.kind] = self._damage(fault)
        self._reshape(incident, did)
        ram, stored, bound = self._run.looks()
        without = self._run.looks(storage=False)
        is_known = ram.known or stored.known
        expected = Expected(bound.least, without.bounds.least, is_known, ram.known)
        line: dict[str, Any] = {
            "seed": self._run.seed,
            "incident": incident.number,
            "job": self._run.job.number,
            "storage": self._run.job.storage,
            "shape": [list(shape), list(self._run.shape)],
            "newest": self._run.newest,
            "in_ram": sorted(ram.whole),
            "in_storage": sorted(stored.whole),
            "least": bound.least,
        }
        began_s = time.monotonic()
        outcome = self._recover(incident, after, expected, did)
        line |= outcome | {"seconds": round(time.monotonic() - began_s, 3)}
        problems += outcome["problems"]
        kinds = [kind for kind in incident.kinds if did.get(kind)]
        step = outcome.get("step")
        line |= {
            "kinds": kinds,
            "did": {kind: did[kind] for kind in kinds},
            "lost": None if step is None else max(0, self._run.newest - step),
            "problems": problems,
            "result": result_of(problems) if problems else outcome["result"],
            "load": round(os.getloadavg()[0], 1),
        }
        self._run.newest = step or 0
        return line

    def _damage(self, fault: Fault) -> str:
        if fault.kind == "slice_wiped":
            slices, per_slice = self._run.shape
            lost = fault.some(0, slices)[: max(1, slices - 1)]
            return self._run.rest.wipe(
                [self._run.hosts[s * per_slice + i] for s in lost for i in range(per_slice)]
            )
        return DAMAGES[fault.kind](self._run.rest, fault)

    def _reshape(self, incident: Incident, did: dict[str, str]) -> None:
        for fault in incident.of("restore"):
            chance = random.Random(fault.numbers[0])
            if fault.kind == "other_shape":
                self._run.shape = fault.pick(1, SHAPES)
                count = self._run.shape[0] * self._run.shape[1]
                others = [host for host in range(MAX_HOSTS) if host not in self._run.hosts]
                self._run.hosts = [*self._run.hosts, *others][:count]
                did[fault.kind] = f"{self._run.shape}"
            elif fault.kind == "other_ids":
                chance.shuffle(self._run.hosts)
                did[fault.kind] = f"{self._run.hosts}"

    def _recover(
        self, incident: Incident, after: Incident, expected: Expected, did: dict[str, str]
    ) -> dict[str, Any]:
        """Start lives until one has restored on all processes; what it restored, and problems."""
        faults, run = incident.of("restore"), self._run
        errors: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            run.start(faults, after)
            problems = self._attempt(faults, did)
            life, number = run.life, len(run.lives) - 1
            assert life is not None
            seen = [{"process": p, **line} for p, line in life.notes("restored")]
            errors = sorted({f"{e['error']}: {e['text']}" for _, e in life.notes("process.raised")})
            if seen and seen[0]["step"] is not None:
                run.lives[number].parent = Save(seen[0]["step"], seen[0]["life"])
            outcome = {"attempts": attempt, "errors": [each[:400] for each in errors]}
            if not problems and seen and run.lives[number].is_from_nothing:
                is_blind = run.trouble.storage_hit and not expected.is_known_in_ram
                run.lives[number].is_blind = is_blind
                if len(seen) == len(run.hosts):
                    return outcome | {"result": "begun anew", "step": None, "problems": []}
                seen = []
            problems += problems_of(seen, run.lives, expected.least(run.trouble.storage_hit))
            if not problems and len(seen) == len(run.hosts):
                step, tier = seen[0]["step"], seen[0].get("tier")
                if step is None and expected.known(run.trouble.storage_hit):
                    problems = ["fresh start: a whole step was known"]
                result = "nothing left" if step is None else "recovered"
                return outcome | {
                    "result": result,
                    "step": step,
                    "tier": tier,
                    "problems": problems,
                }
            life.end()
            run.learn()
            run.trouble.mend()
            if not problems and not faults and not expected.is_right_refusal(errors):
                problems = [f"error: {'; '.join(errors) or life.statuses}"]
            if problems or not faults:
                return outcome | {"result": "nothing left", "step": None, "problems": problems}
            faults = []
        raise AssertionError("an attempt without faults neither restored nor failed")

    def _attempt(self, faults: list[Fault], did: dict[str, str]) -> list[str]:
        life = self._run.life
        assert life is not None
        for fault in sorted(faults, key=lambda f: f.numbers[0]):
            match fault.kind:
                case "kill_in_restore":
                    if life.wait(life.is_settled, 1.2 * fault.numbers[0]):
                        continue
                    killed = fault.some(1, len(self._run.hosts))
                    life.signal(killed, signal.SIGKILL)
                    life.wait(life.is_settled, fault.numbers[2] ** 2)
                    life.signal(range(len(self._run.hosts)), signal.SIGKILL)
                    did[fault.kind] = f"{killed}"
                case "kill_at_restore_event":
                    life.wait(lambda: bool(life.statuses) or life.is_settled(), HANG_S)
                    if life.notes("killed_itself"):
                        life.wait(life.is_settled, fault.numbers[2] ** 2)
                        life.signal(range(len(self._run.hosts)), signal.SIGKILL)
                        did[fault.kind] = fault.text
                case "freeze_in_restore":
                    life.wait(life.is_settled, 0.8 * fault.numbers[0])
                    self._run.trouble.happen(life, fault, self._run.hosts)
                case "resets":
                    did[fault.kind] = f"up to {life.orders[0].resets} on each process"
                case "clock_at_start":
                    did[fault.kind] = f"{[round(order.clock_s) for order in life.orders]} s"
                case "no_restore":
                    did[fault.kind] = fault.text or "before the restore"
                case "other_shape" | "other_ids":
                    pass
                case _:
                    self._run.trouble.happen(life, fault, self._run.hosts)
        did |= self._run.trouble.did
        if not life.wait(life.is_settled, HANG_S):
            life.dump_stacks()
            return [f"hang: {life.running} neither restored nor failed in {HANG_S:g} s"]
        return []


def _pipes(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(directory) / name).is_fifo()]
