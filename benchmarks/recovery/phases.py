"""The parts of a recovery, from the events of a job and the marks of its processes."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """An event: its Unix time, its name, and the life of the job that it belongs to."""

    time_s: float
    name: str
    life: int


class MarkFile:
    """What one process of one life has passed, and when. A line is there once ``add`` returns."""

    def __init__(self, directory: Path, process: int, life: int) -> None:
        self._path = directory / f"{process:05d}_{life}.jsonl"
        self._life = life

    def add(self, name: str, hidden_s: float = 0.0) -> None:
        with self._path.open("a") as file:
            print(json.dumps([time.time(), name, self._life, hidden_s]), file=file)


def read_marks(directory: Path) -> list[tuple[Moment, float]]:
    """Return all marks, each with its ``hidden_s``."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines()]
    return [
        (Moment(time_s, name, life), hidden_s)
        for time_s, name, life, hidden_s in map(json.loads, lines)
    ]


@dataclass(frozen=True)
class Recovery:
    """Seconds of each part, by the keys of ``NAMES``, and how much of the restore was hidden."""

    parts: dict[str, float]
    hidden_s: float

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def recovery(moments: Iterable[Moment], hidden_s: float) -> Recovery:
    """Return the parts of the one recovery. A part of several processes ends with the last one.

    Building the checkpointer counts as restore. ValueError when an event is missing.
    """
    found = sorted(moments, key=lambda moment: moment.time_s)

    def at(name: str, life: int, choose: Callable[[list[float]], float]) -> float:
        times = [each.time_s for each in found if (each.name, each.life) == (name, life)]
        if not times:
            raise ValueError(f"no event {name} in life {life}")
        return choose(times)

    fault_s = at("fault.fired", 0, min)
    exits = [each.time_s for each in found if each.name == "process.exited" and each.life == 0]
    noticed_s = min((time_s for time_s in exits if time_s >= fault_s), default=fault_s)
    ended_s = at("life.ended", 0, max)
    marks = {name: at(name, 1, max) for name in MARKS}
    parts = {
        "notice": noticed_s - fault_s,
        "stop": ended_s - noticed_s,
        "start": marks[IMPORTED] - ended_s,
        "join": marks[JOINED] - marks[IMPORTED],
        "compile": marks[COMPILED] - marks[OPENED],
        "restore": marks[OPENED] - marks[JOINED] + marks[RESTORED] - marks[COMPILED],
        "step": marks[STEPPED] - marks[RESTORED],
    }
    return Recovery(parts, hidden_s)


def median(rounds: Sequence[Recovery]) -> Recovery:
    """Return the median of each part by itself, so that the parts need not add up to a round."""
    parts = {key: statistics.median(each.parts[key] for each in rounds) for key in NAMES}
    return Recovery(parts, statistics.median(each.hidden_s for each in rounds))
