"""The parts of a recovery, from the events of a job and the marks of its processes."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import tables

FAULT_STEP, RESTORE_STEP, LAST_STEP, SAVE_EVERY = 13, 10, 15, 5
SLICES, HOSTS_PER_SLICE = 2, 2
"""The shape of a job, unless it is one of many processes."""
NOBODY = "nobody"
"""Name of the contender that saves nothing."""
# In order. Each of our processes leaves these marks, the last one after its last step.
IMPORTED, JOINED, DESCRIBED, OPENED, COMPILED, RESTORED, STEPPED, SAVING, SAVED, TRAINED = MARKS = (
    "imported", "joined", "described", "opened", "compiled", "restored", "stepped",
    "saving", "saved", "trained",
)  # fmt: skip
HELD = "held"
"""Mark of a process that waits at the fault's step, where no launcher holds it."""


class Part(NamedTuple):
    """A part of a recovery, its owner, and the mark that ends it; "": an event of the job does."""

    title: str
    owner: str
    end: str


PARTS = {
    "notice": Part("noticing", "launcher", ""),
    "stop": Part("stopping", "launcher", ""),
    "start": Part("process start", "Python, imports", IMPORTED),
    "join": Part("JAX start", "JAX", JOINED),
    "describe": Part("shapes of the state", "JAX", DESCRIBED),
    "open": Part("checkpointer's start", "ours", OPENED),
    "compile": Part("compile", "JAX", COMPILED),
    "restore": Part("restore", "ours", RESTORED),
    "step": Part("first step", "JAX", STEPPED),
}
OURS = ("open", "restore")
"""The parts that are the checkpointer's."""
SAVE = "first save"
"""Some steps after the recovery, and no part of its time."""
_ENDS = {key: part.end for key, part in PARTS.items() if part.end}


@dataclass(frozen=True)
class Mark:
    """A moment of a job: what a process has passed, or an event of the launcher.

    Attributes:
      time_s: Unix time.
      cpu_s: CPU time of the process until then.
      main_cpu_s: that of its main thread: neither JAX's service nor other threads of ours.
      step: of RESTORED: the step that is there; 0: none was.
      spent_s: of RESTORED: seconds of the restore by the parts of the event ``restore.phases``; of
        TRAINED: those inside ``save``, as SAVING.
    """

    time_s: float
    name: str
    life: int
    process: int = 0
    cpu_s: float = 0.0
    main_cpu_s: float = 0.0
    step: int = 0
    spent_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


class MarkFile:
    """The marks of one process of one life. A mark is in the file once ``add`` returns."""

    def __init__(self, directory: Path, process: int, life: int) -> None:
        self._path = directory / f"{process:05d}_{life}.jsonl"
        self._process, self._life = process, life

    def add(self, name: str, step: int = 0, spent_s: Mapping[str, float] | None = None) -> None:
        mark = Mark(
            time.time(),
            name,
            self._life,
            self._process,
            time.process_time(),
            time.thread_time(),
            step,
            spent_s or {},
        )
        with self._path.open("a") as file:
            print(json.dumps(dataclasses.asdict(mark)), file=file)


def read_marks(directory: Path) -> list[Mark]:
    """Return the marks of all processes and lives."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines()]
    return [Mark(**json.loads(line)) for line in lines]


@dataclass(frozen=True)
class Recovery:
    """The parts and costs of one recovery.

    Attributes:
      parts: seconds, by the keys of ``PARTS``.
      cpu_s: CPU time of all processes from their start to the first step. It depends less than
        ``parts`` on the machine's other load.
      save_s: the first save, from the call until the last process knows that it is complete.
      mean_cpu_s: CPU time of a process in each part that begins with its start, and ``SAVE``.
      leader_cpu_s: the same of process 0.
      main_cpu_s: the same of process 0's main thread alone.
      spent_s: seconds of the restore at process 0, by the parts of ``restore.phases``.
    """

    parts: Mapping[str, float]
    cpu_s: float
    save_s: float
    mean_cpu_s: Mapping[str, float]
    leader_cpu_s: Mapping[str, float]
    main_cpu_s: Mapping[str, float]
    spent_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def ours_s(self) -> float:
        """Return the time of the checkpointer itself."""
        return sum(self.parts[key] for key in OURS)


def at(
    marks: Iterable[Mark], name: str, life: int, choose: Callable[[list[float]], float] = max
) -> float:
    """Return the time of a mark or event of one life. ValueError when it is missing."""
    times = [mark.time_s for mark in marks if (mark.name, mark.life) == (name, life)]
    if not times:
        raise ValueError(f"no event {name} in life {life}")
    return choose(times)


def parts_of(marks: Sequence[Mark], life: int) -> dict[str, float]:
    """Return the seconds of the recovery that began a ``life`` above 0, by the keys of ``PARTS``.

    A part of several processes ends with the last one. ValueError when an event is missing.
    """
    fault_s = at(marks, "fault.fired", life - 1, min)
    exits = [m.time_s for m in marks if (m.name, m.life) == ("process.exited", life - 1)]
    noticed_s = min((time_s for time_s in exits if time_s >= fault_s), default=fault_s)
    ended_s = at(marks, "life.ended", life - 1)
    parts, before_s = {"notice": noticed_s - fault_s, "stop": ended_s - noticed_s}, ended_s
    for key, name in _ENDS.items():
        passed_s = at(marks, name, life)
        parts[key], before_s = passed_s - before_s, passed_s
    return parts


def recovery(marks: Sequence[Mark]) -> Recovery:
    """Return the parts of the one recovery, from all marks and events of its job.

    RuntimeError when a process restored another step than the last save; ValueError when an event
    is missing.
    """
    of_process: dict[int, dict[str, Mark]] = {}
    for mark in marks:
        if mark.life == 1 and mark.name in MARKS:
            of_process.setdefault(mark.process, {})[mark.name] = mark
    parts = parts_of(marks, 1)
    for process, passed in of_process.items():
        if passed[RESTORED].step != RESTORE_STEP:
            raise RuntimeError(f"process {process} restored step {passed[RESTORED].step}")
    cpu_s = [_by_part(passed, lambda mark: mark.cpu_s) for passed in of_process.values()]
    leader = of_process[0]
    return Recovery(
        parts=parts,
        cpu_s=sum(passed[STEPPED].cpu_s for passed in of_process.values()),
        save_s=at(marks, SAVED, 1) - at(marks, SAVING, 1),
        mean_cpu_s={key: statistics.fmean(each[key] for each in cpu_s) for key in cpu_s[0]},
        leader_cpu_s=_by_part(leader, lambda mark: mark.cpu_s),
        main_cpu_s=_by_part(leader, lambda mark: mark.main_cpu_s),
        spent_s=leader[RESTORED].spent_s,
    )


def _by_part(passed: Mapping[str, Mark], until_s: Callable[[Mark], float]) -> dict[str, float]:
    """Return the CPU time of a process in each part. ``until_s``: until a mark."""
    found, before_s = dict[str, float](), 0.0
    for key, name in _ENDS.items():
        passed_s = until_s(passed[name])
        found[key], before_s = passed_s - before_s, passed_s
    found[SAVE] = until_s(passed[SAVED]) - until_s(passed[SAVING])
    return found


def median(rounds: Sequence[Recovery]) -> Recovery:
    """Return the median of each part by itself, so that the parts need not add up to a round."""
    return Recovery(**tables.middle_of([dataclasses.asdict(each) for each in rounds]))
