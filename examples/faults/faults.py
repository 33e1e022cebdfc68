"""The faults that the supervisor injects: their text form, parsed and checked. Pure.

A fault is words separated by spaces, in any order:

```
step=23              fires when a process reports this step, or a later one (required)
kill=slice:1         its target (required): process:3 | host:2 | hosts:1,3 | slice:1 | all
lose-ram             those hosts' ramdisks are empty in the next life (otherwise RAM is kept)
permute=reverse      the next life renumbers the processes:
                     reverse | swap-slices | seed:7 | 3,2,1,0 (new index of each process in turn)
signal=KILL          the signal sent: KILL (default) | TERM | STOP | ABRT
resume-after-s=1.5   with signal=STOP: seconds until the SIGCONT
exact                the target's processes wait inside `report_step(step)` for the fault
```

`process` and `slice` are numbered as in the life in which the fault fires; `host` is the physical
host, independent of its process's index. Without `exact` the supervisor sees a step some ten
milliseconds late, so the processes may be some steps further.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from emergency_ckpt.errors import ConfigError
from examples.faults.job_layout import JobLayout

TargetKind = Literal["process", "host", "slice", "all"]
SignalName = Literal["KILL", "TERM", "STOP", "ABRT"]

_NUMBER = re.compile(r"[0-9]{1,15}")
_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")


@dataclass(frozen=True)
class Target:
    """The target of a fault.

    Attributes:
      kind: the kind of the ``indices``.
      indices: ascending and distinct; empty for ``all``, one entry except for ``host``.
    """

    kind: TargetKind
    indices: tuple[int, ...] = ()

    def processes(self, topology: JobLayout) -> tuple[int, ...]:
        """Return the process indices of the target in ``topology``, ascending."""
        if self.kind == "all":
            return tuple(range(topology.process_count))
        if self.kind == "process":
            return self.indices
        if self.kind == "slice":
            return topology.processes_of_slice(self.indices[0])
        return tuple(sorted(topology.process_on(host) for host in self.indices))


@dataclass(frozen=True)
class Fault:
    """One fault; it fires once. ``text`` is its text form, whose words the other fields have."""

    text: str
    step: int
    target: Target
    lose_ram: bool = False
    permute: str | None = None
    signal: SignalName = "KILL"
    resume_after_s: float | None = None
    exact: bool = False

    @property
    def deadly(self) -> bool:
        """Return True when the fault ends the target's processes in any case."""
        return self.signal in ("KILL", "ABRT")

    def problems(self, topology: JobLayout) -> list[str]:
        """Return the problems of this fault for a job of this size; empty without any."""
        problems: list[str] = []
        limit = topology.slices if self.target.kind == "slice" else topology.process_count
        for index in self.target.indices:
            if index >= limit:
                problems.append(f"fault '{self}': no {self.target.kind} {index}, there are {limit}")
        count = topology.process_count
        if self.permute is not None:
            new_index = new_indices(self.permute, topology)
            if sorted(new_index) != list(range(count)):
                problems.append(
                    f"fault '{self}': permute must name each of 0..{count - 1} exactly once"
                )
        return problems

    def __str__(self) -> str:
        return self.text


def new_indices(permute: str, topology: JobLayout) -> tuple[int, ...]:
    """Return the new index of each process of ``topology``; ``permute`` as in a fault's text.

    A permutation, unless ``permute`` lists indices that do not fit ``topology``.
    """
    count = topology.process_count
    if permute == "reverse":
        return tuple(reversed(range(count)))
    if permute == "swap-slices":
        size = topology.hosts_per_slice
        last = topology.slices - 1
        return tuple((last - i // size) * size + i % size for i in range(count))
    if permute.startswith("seed:"):
        shuffled = list(range(count))
        seed = int(permute.removeprefix("seed:"))
        random.Random(seed).shuffle(shuffled)  # noqa: S311 - repeatable, not secret
        return tuple(shuffled)
    return _numbers(permute)


def parse_fault(text: str) -> Fault:
    """Return the fault that ``text`` describes, with its words.

    Raises:
      ConfigError: lists all problems of the text.
    """
    problems: list[str] = []
    values: dict[str, str] = {}
    flags: set[str] = set()
    for word in text.split():
        key, equals, value = word.partition("=")
        if key in values or key in flags:
            problems.append(f"{key} is given twice")
        elif equals and key in _VALUE_WORDS:
            values[key] = value
        elif not equals and key in _FLAG_WORDS:
            flags.add(key)
        else:
            known = " ".join([*(f"{name}=..." for name in _VALUE_WORDS), *_FLAG_WORDS])
            problems.append(f"unknown word '{word}', known: {known}")
    problems += [f"{name}=... is missing" for name in ("step", "kill") if name not in values]
    parsed: dict[str, object] = {}
    for key, value in values.items():
        field, parse = _VALUE_WORDS[key]
        try:
            parsed[field] = parse(value)
        except ValueError as error:
            problems.append(f"{key}={value}: {error}")
    if "resume-after-s" in values and values.get("signal") != "STOP":
        problems.append("resume-after-s needs signal=STOP")
    if problems:
        raise ConfigError(problems, target=f"fault '{text}'")
    text = " ".join(text.split())
    return Fault(text, lose_ram="lose-ram" in flags, exact="exact" in flags, **parsed)  # type: ignore[arg-type]


def check_faults(faults: Sequence[Fault], topology: JobLayout) -> list[str]:
    """Return the problems of ``faults`` for a job of this size; empty without any."""
    return [problem for fault in faults for problem in fault.problems(topology)]


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(_number(part) for part in text.split(","))
    if len(set(numbers)) != len(numbers):
        raise ValueError("a number is given twice")
    return numbers


def _target(text: str) -> Target:
    kind, colon, rest = text.partition(":")
    if kind == "all" and not colon:
        return Target("all")
    if kind in ("process", "host", "slice") and colon:
        return Target(kind, (_number(rest),))
    if kind == "hosts" and colon:
        return Target("host", tuple(sorted(_numbers(rest))))
    raise ValueError("expected process:N, host:N, hosts:N,M, slice:N or all")


def _permutation(text: str) -> str:
    if text.startswith("seed:"):
        _number(text.removeprefix("seed:"))
    elif _NUMBER.match(text):
        _numbers(text)
    elif text not in ("reverse", "swap-slices"):
        raise ValueError("expected reverse, swap-slices, seed:N or a list like 3,2,1,0")
    return text


def _signal(text: str) -> str:
    if text not in get_args(SignalName):
        raise ValueError(f"expected one of {', '.join(get_args(SignalName))}")
    return text


def _seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text):
        raise ValueError("expected seconds, like 1.5")
    return float(text)


_VALUE_WORDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "step": ("step", _number),
    "kill": ("target", _target),
    "permute": ("permute", _permutation),
    "signal": ("signal", _signal),
    "resume-after-s": ("resume_after_s", _seconds),
}
_FLAG_WORDS = ("lose-ram", "exact")
