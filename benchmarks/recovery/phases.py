"""The parts of a recovery, from the events of a job and the marks of its processes."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FAULT_STEP, RESTORE_STEP, LAST_STEP = 13, 10, 15
HELD = "held"
"""Mark of a process that waits at the fault's step, where no launcher holds it."""

# In order. Each of our processes leaves the marks; the launcher leaves the other events.
IMPORTED, JOINED, DESCRIBED, OPENED, COMPILED, RESTORED, STEPPED, SAVING, SAVED = MARKS = (
    "imported", "joined", "described", "opened", "compiled", "restored", "stepped",
    "saving", "saved",
)  # fmt: skip

NAMES = {
    "notice": "noticing",
    "stop": "stopping",
    "start": "process start",
    "join": "JAX start",
    "describe": "shapes of the state",
    "open": "checkpointer's start",
    "compile": "compile",
    "restore": "restore",
    "step": "first step",
}
SAVE = "first save"
"""Some steps after the recovery, and no part of its time."""
OURS = ("open", "restore")
"""The parts that are the checkpointer's."""
_ENDS = {
    "start": IMPORTED,
    "join": JOINED,
    "describe": DESCRIBED,
    "open": OPENED,
    "compile": COMPILED,
    "restore": RESTORED,
    "step": STEPPED,
}


@dataclass(frozen=True)
class Moment:
    """An event: its Unix time, its name, and its life of the job."""

    time_s: float
    name: str
    life: int


@dataclass(frozen=True)
class Mark:
    """A moment that a process reached.

    Attributes:
      cpu_s: CPU time of the process until then.
      main_cpu_s: that of its main thread: neither JAX's service nor other threads of ours.
      spent_s: seconds of the restore by the names of ``contenders.TellsParts``.
    """

    moment: Moment
    cpu_s: float
    process: int = 0
    main_cpu_s: float = 0.0
    spent_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


class MarkFile:
    """The marks of one process of one life. A mark is in the file once ``add`` returns."""

    def __init__(self, directory: Path, process: int, life: int) -> None:
        self._path = directory / f"{process:05d}_{life}.jsonl"
        self._process, self._life = process, life

    def add(self, name: str, spent_s: Mapping[str, float] | None = None) -> None:
        mark = Mark(
            Moment(time.time(), name, self._life),
            time.process_time(),
            self._process,
            time.thread_time(),
            spent_s or {},
        )
        with self._path.open("a") as file:
            print(json.dumps(dataclasses.asdict(mark)), file=file)


def read_marks(directory: Path) -> list[Mark]:
    """Return the marks of all processes and lives."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines()]
    found = map(json.loads, lines)
    return [Mark(**{**mark, "moment": Moment(**mark["moment"])}) for mark in found]


@dataclass(frozen=True)
class Recovery:
    """The parts and costs of one recovery.

    Attributes:
      parts: seconds, by the keys of ``NAMES``.
      cpu_s: CPU time of all processes from their start to the first step. It depends less than
        ``parts`` on the machine's other load.
      save_s: the first save, from the call until the last process knows that it is complete.
      mean_cpu_s: CPU time of a process in each part that begins with its start, and ``SAVE``.
      leader_cpu_s: the same of process 0. main_cpu_s: of its main thread alone.
      spent_s: seconds of the restore at process 0, by the parts of ``restore.phases``.
    """

    parts: dict[str, float]
    cpu_s: float
    save_s: float = 0.0
    mean_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    leader_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    main_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    spent_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def ours_s(self) -> float:
        """Return the time of the checkpointer itself."""
        return sum(self.parts[key] for key in OURS)


def at(
    moments: Iterable[Moment], name: str, life: int, choose: Callable[[list[float]], float]
) -> float:
    """Return the time of an event of one life. ValueError when it is missing."""
    times = [each.time_s for each in moments if (each.name, each.life) == (name, life)]
    if not times:
        raise ValueError(f"no event {name} in life {life}")
    return choose(times)


def parts_of(moments: Sequence[Moment], life: int) -> dict[str, float]:
    """Return the seconds of the recovery that began a ``life`` above 0, by the keys of ``NAMES``.

    A part of several processes ends with the last one. ValueError when an event is missing.
    """
    fault_s = at(moments, "fault.fired", life - 1, min)
    exits = [
        each.time_s for each in moments if (each.name, each.life) == ("process.exited", life - 1)
    ]
    noticed_s = min((time_s for time_s in exits if time_s >= fault_s), default=fault_s)
    ended_s = at(moments, "life.ended", life - 1, max)
    parts, before_s = {"notice": noticed_s - fault_s, "stop": ended_s - noticed_s}, ended_s
    for key, name in _ENDS.items():
        passed_s = at(moments, name, life, max)
        parts[key], before_s = passed_s - before_s, passed_s
    return parts


def recovery(events: Iterable[Moment], marks: Sequence[Mark]) -> Recovery:
    """Return the parts of the one recovery. A part of several processes ends with the last one.

    ValueError when an event is missing.
    """
    found = [*events, *(mark.moment for mark in marks)]
    parts = parts_of(found, 1)
    begun = [mark for mark in marks if mark.moment.life == 1]
    cpu_s = _cpu_s(begun, lambda mark: mark.cpu_s)
    main_cpu_s = _cpu_s(begun, lambda mark: mark.main_cpu_s)
    restored = [mark for mark in begun if (mark.moment.name, mark.process) == (RESTORED, 0)]
    return Recovery(
        parts,
        sum(mark.cpu_s for mark in begun if mark.moment.name == STEPPED),
        at(found, SAVED, 1, max) - at(found, SAVING, 1, max),
        {key: statistics.fmean(each[key] for each in cpu_s.values()) for key in (*_ENDS, SAVE)},
        cpu_s[0],
        main_cpu_s[0],
        dict(restored[0].spent_s) if restored else {},
    )


def _cpu_s(marks: Iterable[Mark], until_s: Callable[[Mark], float]) -> dict[int, dict[str, float]]:
    """Return the CPU time of each process of a life in each part. ``until_s``: until a mark."""
    until: dict[int, dict[str, float]] = {}
    for mark in marks:
        until.setdefault(mark.process, {})[mark.moment.name] = until_s(mark)
    found: dict[int, dict[str, float]] = {}
    for process, at in until.items():
        before, of_process = 0.0, found.setdefault(process, {})
        for key, name in _ENDS.items():
            of_process[key], before = at[name] - before, at[name]
        of_process[SAVE] = at[SAVED] - at[SAVING]
    return found


def median(rounds: Sequence[Recovery]) -> Recovery:
    """Return the median of each part by itself, so that the parts need not add up to a round."""

    def middle(figures: Callable[[Recovery], Mapping[str, float]]) -> dict[str, float]:
        names = figures(rounds[0])
        return {key: statistics.median(figures(each)[key] for each in rounds) for key in names}

    return Recovery(
        middle(lambda each: each.parts),
        statistics.median(each.cpu_s for each in rounds),
        statistics.median(each.save_s for each in rounds),
        middle(lambda each: each.mean_cpu_s),
        middle(lambda each: each.leader_cpu_s),
        middle(lambda each: each.main_cpu_s),
        middle(lambda each: each.spent_s),
    )
