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
import math
import random
import sys
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.common import machine, program, tables
from benchmarks.common.program import positive, some_of
from benchmarks.recovery import launched, phases
from examples.faults.faults import Fault, parse_fault

CONTENDERS = ("ours", "orbax-emergency", "orbax")
NEAREST, FARTHEST = 100, 300
"""Steps between two failures."""
KINDS = ("kill=all", "kill=process:{process} lose-ram", "kill=slice:{slice} lose-ram")
_MEASURED_EVERY = 10
_STORED_EVERY = 50
"""A contender with two tiers brings a save to storage as well about every so many steps."""
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
      parts: seconds of all recoveries together, by the keys of ``phases.PARTS``.
      saving_s: seconds that process 0 of the last life spent in calls of ``save``.
    """

    contender: str
    every: int
    seconds: float
    trained: int
    lives: int
    parts: dict[str, float]
    saving_s: float


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out = options.out.resolve()  # storage is there, and is named by its whole path
    options.out.mkdir(parents=True, exist_ok=True)
    about = machine.facts()
    faults = failures(options.seed, options.steps)
    undisturbed = _run(options, phases.NOBODY, options.steps, _MEASURED_EVERY, ())
    step_s = undisturbed.seconds / options.steps
    outcomes = [undisturbed]
    few = min(options.steps, options.measured_steps)
    for name in options.contenders:
        # One after the other: this machine is not alike at all times.
        without = _run(options, phases.NOBODY, few, _MEASURED_EVERY, ())
        measured = _run(options, name, few, _MEASURED_EVERY, ())
        saves = few / _MEASURED_EVERY
        # What is spent in ``save`` is the least that a save costs; the difference has its noise.
        cost_s = max(measured.saving_s, measured.seconds - without.seconds) / saves
        every = best_interval(cost_s, options.steps * step_s / (len(faults) + 1), step_s)
        outcomes.append(_run(options, name, options.steps, every, faults))
    document = {
        "faults": [fault.text for fault in faults],
        "outcomes": [dataclasses.asdict(each) for each in outcomes],
    }
    program.publish(options, "minutes", about, _text(options, about, faults, outcomes), document)
    return 0


def failures(seed: int, steps: int) -> list[Fault]:
    """Return the failures of a job of ``steps``, whose slices have one process each. Pure."""
    chance, found, step = random.Random(seed), list[Fault](), 0
    while (step := step + chance.randint(NEAREST, FARTHEST)) < steps:
        where = chance.randrange(phases.SLICES)
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
    stored_every = every * max(1, round(_STORED_EVERY / every))
    job = ["--contender", name, "--steps", str(steps)]
    job += ["--every", str(every), "--stored-every", str(stored_every)]
    marks = launched.run(
        job,
        hosts_per_slice=1,
        faults=faults,
        ramdisk=options.ramdisk,
        storage=options.out,
        timeout_s=options.timeout_s,
    )
    last = max(mark.life for mark in marks)
    recoveries = [phases.parts_of(marks, life) for life in range(1, last + 1)]
    # Each life trains from the step that it restored to that of its failure; the last, to the end.
    restored = {mark.life: mark.step for mark in marks if mark.name == phases.RESTORED}
    ends = [*(fault.step for fault in faults), steps]
    (trained,) = [m for m in marks if (m.name, m.process, m.life) == (phases.TRAINED, 0, last)]
    return Outcome(
        contender=name,
        every=every,
        seconds=phases.at(marks, phases.TRAINED, last) - phases.at(marks, phases.RESTORED, 0),
        trained=sum(ends[life] - restored[life] for life in range(last + 1)),
        lives=last + 1,
        parts={key: sum(of_life[key] for of_life in recoveries) for key in phases.PARTS},
        saving_s=trained.spent_s[phases.SAVING],
    )


def _parser() -> argparse.ArgumentParser:
    parser = program.new_parser("minutes", __doc__, job_timeout_s=3600.0)
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--measured-steps", type=positive, default=300, help="for the cost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contenders", type=some_of(CONTENDERS), default=list(CONTENDERS))
    return parser


def _text(
    options: argparse.Namespace,
    about: dict[str, Any],
    faults: Sequence[Fault],
    outcomes: Sequence[Outcome],
) -> str:
    number, undisturbed = tables.number, outcomes[0]
    rows = [["", "undisturbed", *(outcome.contender for outcome in outcomes[1:])]]
    rows.append(["minutes", *(number(outcome.seconds / 60) for outcome in outcomes)])
    for title, cells in {
        "minutes more than undisturbed": [
            number((outcome.seconds - undisturbed.seconds) / 60) for outcome in outcomes[1:]
        ],
        "steps between saves": [str(outcome.every) for outcome in outcomes[1:]],
        "steps done again": [str(outcome.trained - options.steps) for outcome in outcomes[1:]],
        "recoveries, seconds together": _seconds_of(outcomes[1:], phases.PARTS),
        "- of it Python and JAX": _seconds_of(outcomes[1:], _JAX),
        "- of it the checkpointer": _seconds_of(outcomes[1:], phases.OURS),
    }.items():
        rows.append([title, "-", *cells])
    head = (
        f"{options.steps} steps, {len(faults)} failures (seed {options.seed}), {phases.SLICES}"
        f" slices of one process; {machine.text(about)}, CPU devices;"
        f" load average {about['load_average_at_start']:.1f} at the start"
    )
    return "\n".join([head, "", tables.markdown(rows)])


def _seconds_of(outcomes: Sequence[Outcome], parts: Collection[str]) -> list[str]:
    """Return the seconds of these parts of all recoveries of each job."""
    return [tables.number(sum(outcome.parts[key] for key in parts)) for outcome in outcomes]


if __name__ == "__main__":
    sys.exit(main())
