"""The parts of a recovery, from the events of a job and the marks of its processes."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FAULT_STEP, RESTORE_STEP, LAST_STEP = 13, 10, 14
HELD = "held"
"""Mark of a process that waits at the fault's step, where no launcher holds it."""

# In order. Each of our processes leaves the marks; the launcher leaves the other events.
IMPORTED, JOINED, OPENED, COMPILED, RESTORED, STEPPED = MARKS = (
    "imported", "joined", "opened", "compiled", "restored", "stepped",
)  # fmt: skip

NAMES = {
    "notice": "noticing",
    "stop": "stopping",
    "start": "process start",
    "join": "JAX start",
    "compile": "compile",
    "restore": "restore",
    "step": "first step",
}


@dataclass(frozen=True)
class Moment:
    """An event: its Unix time, its name, and its life of the job."""

    time_s: float
    name: str
    life: int


@dataclass(frozen=True)
class Mark:
    """A moment that a process reached, its CPU time until then, and ``hidden_s``."""

    moment: Moment
    cpu_s: float
    hidden_s: float


class MarkFile:
    """The marks of one process of one life. A mark is in the file once ``add`` returns."""

    def __init__(self, directory: Path, process: int, life: int) -> None:
        self._path = directory / f"{process:05d}_{life}.jsonl"
        self._life = life

    def add(self, name: str, hidden_s: float = 0.0) -> None:
        with self._path.open("a") as file:
            values = [time.time(), name, self._life, time.process_time(), hidden_s]
            print(json.dumps(values), file=file)


def read_marks(directory: Path) -> list[Mark]:
    """Return the marks of all processes and lives."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines()]
    return [
        Mark(Moment(time_s, name, life), cpu_s, hidden_s)
        for time_s, name, life, cpu_s, hidden_s in map(json.loads, lines)
    ]


@dataclass(frozen=True)
class Recovery:
    """The parts and costs of one recovery.

    Attributes:
      parts: seconds, by the keys of ``NAMES``.
      hidden_s: seconds by which the prefetch shortened the restore.
      cpu_s: CPU time of all processes from their start to the first step. It depends less than
        ``parts`` on the machine's other load.
    """

    parts: dict[str, float]
    hidden_s: float
    cpu_s: float

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def recovery(events: Iterable[Moment], marks: Sequence[Mark]) -> Recovery:
    """Return the parts of the one recovery. A part of several processes ends with the last one.

    Building the checkpointer counts as restore. ValueError when an event is missing.
    """
    found = [*events, *(mark.moment for mark in marks)]

    def at(name: str, life: int, choose: Callable[[list[float]], float]) -> float:
        times = [each.time_s for each in found if (each.name, each.life) == (name, life)]
        if not times:
            raise ValueError(f"no event {name} in life {life}")
        return choose(times)

    fault_s = at("fault.fired", 0, min)
    exits = [each.time_s for each in found if each.name == "process.exited" and each.life == 0]
    noticed_s = min((time_s for time_s in exits if time_s >= fault_s), default=fault_s)
    ended_s = at("life.ended", 0, max)
    passed = {name: at(name, 1, max) for name in MARKS}
    parts = {
        "notice": noticed_s - fault_s,
        "stop": ended_s - noticed_s,
        "start": passed[IMPORTED] - ended_s,
        "join": passed[JOINED] - passed[IMPORTED],
        "compile": passed[COMPILED] - passed[OPENED],
        "restore": passed[OPENED] - passed[JOINED] + passed[RESTORED] - passed[COMPILED],
        "step": passed[STEPPED] - passed[RESTORED],
    }
    stepped = [mark.cpu_s for mark in marks if (mark.moment.name, mark.moment.life) == (STEPPED, 1)]
    return Recovery(parts, max(mark.hidden_s for mark in marks), sum(stepped))


def median(rounds: Sequence[Recovery]) -> Recovery:
    """Return the median of each part by itself, so that the parts need not add up to a round."""
    parts = {key: statistics.median(each.parts[key] for each in rounds) for key in NAMES}
    hidden_s = statistics.median(each.hidden_s for each in rounds)
    return Recovery(parts, hidden_s, statistics.median(each.cpu_s for each in rounds))
