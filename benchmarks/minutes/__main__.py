"""Measure the minutes that a job needs for so many steps, although it fails every few hundred.

    python -m benchmarks.minutes --steps 2000

`eckpt launch` runs the demo's model in real processes of two slices. At steps that a seed chooses,
100 to 300 apart, it loses all processes, a process with its RAM, or a slice with its RAM, and
starts again. All contenders meet the same failures at the same steps, so that one that goes back
further meets no more of them. Each saves at the interval that is best for its own cost by Young's
formula (1974): the root of twice the cost of a save times the mean time between failures. The cost
is measured first, in jobs without failures. benchmarks/README.md explains the rows.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import machine, tables
from benchmarks.common.arguments import above_0, positive, some_of
from benchmarks.minutes.worker import NOBODY, SAVING, STEPS, TRAINED
from benchmarks.recovery import phases
from emergency_ckpt.tools.launch.job import JobSpec
from examples.faults.faults import Fault, parse_fault
from examples.faults.injection import FaultySupervisor

CONTENDERS = ("ours", "orbax-emergency", "orbax")
NEAREST, FARTHEST = 100, 300
"""Steps between two failures."""
KINDS = ("kill=all", "kill=process:{process} lose-ram", "kill=slice:{slice} lose-ram")
_MEASURED_EVERY = 10
_JAX = ("start", "join", "compile", "step")
"""The parts of a recovery that are those of Python and JAX; others: the launcher, the contender."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one job took.

    Attributes:
      contender: its name. every: steps between its saves.
      seconds: from the first step's start to the end of the last step, over all lives.
      trained: steps, with those that were done again.
      lives: starts of the job.
      parts: seconds of all recoveries together, by the keys of ``phases.NAMES``.
      saving_s: seconds that process 0 of the last life spent in calls of ``save``.
    """

    contender: str
    every: int
    seconds: float
    trained: int
    lives: int
    parts: dict[str, float]
    saving_s: float = 0.0

    @property
    def of_jax_s(self) -> float:
        """Return the part of the recoveries that belongs to Python and JAX."""
        return sum(self.parts[key] for key in _JAX)

    @property
    def of_contender_s(self) -> float:
        """Return the part that belongs to the checkpointer: its start, and the restore."""
        return sum(self.parts[key] for key in phases.OURS)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out = options.out.resolve()  # storage is named by its whole path
    options.out.mkdir(parents=True, exist_ok=True)
    about, load = machine.facts(), os.getloadavg()[0]
    faults = failures(options.seed, options.steps, options.slices)
    undisturbed = _run(options, NOBODY, options.steps, _MEASURED_EVERY, ())
    step_s = undisturbed.seconds / options.steps
    outcomes = [undisturbed]
    few = min(options.steps, options.measured_steps)
    for name in options.contenders:
        # One after the other: this machine is not alike at all times.
        without, measured = (_run(options, n, few, _MEASURED_EVERY, ()) for n in (NOBODY, name))
        saves = few / _MEASURED_EVERY
        # What is spent in ``save`` is the least that a save costs; the difference has its noise.
        cost_s = max(measured.saving_s, measured.seconds - without.seconds) / saves
        every = best_interval(cost_s, options.steps * step_s / (len(faults) + 1), step_s)
        outcomes.append(_run(options, name, options.steps, every, faults))
    print(_text(options, about, load, faults, outcomes))
    document = {
        "schema_version": 1,
        "machine": about,
        "load_average": load,
        "faults": [fault.text for fault in faults],
        "outcomes": [dataclasses.asdict(each) for each in outcomes],
    }
    (options.out / "minutes.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nWritten to {options.out / 'minutes.json'}")
    return 0


def failures(seed: int, steps: int, slices: int) -> list[Fault]:
    """Return the failures of a job of ``steps`` and of one process a slice. Pure."""
    chance, found, step = random.Random(seed), list[Fault](), 0
    while (step := step + chance.randint(NEAREST, FARTHEST)) < steps:
        where = chance.randrange(slices)
        kind = chance.choice(KINDS).format(process=where, slice=where)
        found.append(parse_fault(f"step={step} {kind} exact"))
    return found


def best_interval(cost_s: float, between_failures_s: float, step_s: float) -> int:
    """Return the steps between saves by Young's formula; 1 where a save costs nothing. Pure."""
    return max(1, round(math.sqrt(2 * cost_s * between_failures_s) / step_s))


def _run(
    options: argparse.Namespace, name: str, steps: int, every: int, faults: Sequence[Fault]
) -> Outcome:
    """Run one job to its end. RuntimeError, with the log, when it does not come there."""
    text = f"{name}: {steps} steps, a save every {every}, {len(faults)} failures"
    print(text, file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix="eckpt-minutes-", dir=options.ramdisk))
    try:
        marks_dir, stored = work / "marks", Path(tempfile.mkdtemp(dir=options.out))
        marks_dir.mkdir()
        places = ["--marks-dir", str(marks_dir), "--dir", str(stored)]
        job = ["--contender", name, "--steps", str(steps), "--every", str(every), *places]
        spec = JobSpec(
            command=(sys.executable, "-m", "benchmarks.minutes.worker", *job),
            slices=options.slices,
            hosts_per_slice=1,
            devices_per_host=1,
            local_root=work / "ram",
            log_dir=work / "logs",
            env={"PYTHONPATH": str(ROOT)},
            max_restarts=len(faults),
        )
        result = FaultySupervisor(spec, faults).run(options.timeout_s)
        shutil.rmtree(stored)
        if result.error is not None:
            raise RuntimeError(f"{text}: {result.error}")
        events = [phases.Moment(each.time_s, each.name, each.life) for each in result.events]
        marks = phases.read_marks(marks_dir)
        moments = [*events, *(mark.moment for mark in marks)]
        lives = len(result.lives)
        parts = [phases.parts_of(moments, life) for life in range(1, lives)]
        return Outcome(
            name,
            every,
            phases.at(moments, TRAINED, lives - 1, max)
            - phases.at(moments, phases.RESTORED, 0, max),
            (work / STEPS).stat().st_size,
            lives,
            {key: sum(of_life[key] for of_life in parts) for key in phases.NAMES},
            max(mark.spent_s.get(SAVING, 0.0) for mark in marks if mark.process == 0),
        )
    finally:
        shutil.rmtree(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.minutes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--measured-steps", type=positive, default=300, help="for the cost")
    parser.add_argument("--slices", type=positive, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contenders", type=some_of(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="storage is there too")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout-s", type=above_0, default=3600.0, help="for each job")
    return parser


def _text(
    options: argparse.Namespace,
    about: dict[str, Any],
    load: float,
    faults: Sequence[Fault],
    outcomes: Sequence[Outcome],
) -> str:
    number, undisturbed = tables.number, outcomes[0]
    rows = [["", *("undisturbed" if o is undisturbed else o.contender for o in outcomes)]]

    def row(name: str, cells: Sequence[str]) -> None:
        rows.append([name, "-" if name != "minutes" else cells[0], *cells[1:]])

    row("minutes", [number(o.seconds / 60) for o in outcomes])
    row("minutes more than undisturbed", [
        number((o.seconds - undisturbed.seconds) / 60) for o in outcomes
    ])  # fmt: skip
    row("steps between saves", [str(o.every) for o in outcomes])
    row("steps done again", [str(o.trained - options.steps) for o in outcomes])
    row("recoveries, seconds together", [number(sum(o.parts.values())) for o in outcomes])
    row("- of it Python and JAX", [number(o.of_jax_s) for o in outcomes])
    row("- of it the checkpointer", [number(o.of_contender_s) for o in outcomes])
    head = (
        f"{options.steps} steps, {len(faults)} failures (seed {options.seed}), {options.slices}"
        f" slices of one process; {about['cores']} cores, {about['cpu']}, CPU devices;"
        f" load average {load:.1f} at the start"
    )
    return "\n".join([head, "", tables.markdown(rows)])


if __name__ == "__main__":
    sys.exit(main())
