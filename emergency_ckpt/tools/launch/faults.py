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
from emergency_ckpt.tools.launch.job_layout import JobLayout

TargetKind = Literal["process", "host", "slice", "all"]
SignalName = Literal["KILL", "TERM", "STOP", "ABRT"]
PermutationKind = Literal["reverse", "swap-slices", "seed", "explicit"]

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

    def __str__(self) -> str:
        if self.kind == "all":
            return "all"
        plural = "s" if len(self.indices) > 1 else ""
        return f"{self.kind}{plural}:{','.join(map(str, self.indices))}"


@dataclass(frozen=True)
class Permutation:
    """The renumbering of the processes in the next life.

    Attributes:
      kind: ``explicit`` uses ``new_index``, ``seed`` shuffles with ``seed``.
    """

    kind: PermutationKind
    seed: int = 0
    new_index: tuple[int, ...] = ()

    def resolve(self, topology: JobLayout) -> tuple[int, ...]:
        """Return the new index of each process: a permutation."""
        count = topology.process_count
        if self.kind == "reverse":
            return tuple(reversed(range(count)))
        if self.kind == "swap-slices":
            size = topology.hosts_per_slice
            last = topology.slices - 1
            return tuple((last - i // size) * size + i % size for i in range(count))
        if self.kind == "seed":
            shuffled = list(range(count))
            random.Random(self.seed).shuffle(shuffled)  # noqa: S311 - repeatable, not secret
            return tuple(shuffled)
        return self.new_index

    def fits(self, topology: JobLayout) -> bool:
        """Return True when it is a permutation of the processes of ``topology``."""
        return sorted(self.resolve(topology)) == list(range(topology.process_count))

    def __str__(self) -> str:
        if self.kind == "seed":
            return f"seed:{self.seed}"
        return ",".join(map(str, self.new_index)) if self.kind == "explicit" else self.kind


@dataclass(frozen=True)
class Fault:
    """One fault; it fires once. The module's docstring describes the fields."""

    step: int
    target: Target
    lose_ram: bool = False
    permute: Permutation | None = None
    signal: SignalName = "KILL"
    resume_after_s: float | None = None
    exact: bool = False

    @property
    def deadly(self) -> bool:
        """Return True when the fault ends the target's processes in any case."""
        return self.signal in ("KILL", "ABRT")

    def problems(self, topology: JobLayout) -> list[str]:
        """Return the problems of this fault for a job of this size; empty without any."""
        found: list[str] = []
        limit = topology.slices if self.target.kind == "slice" else topology.process_count
        for index in self.target.indices:
            if index >= limit:
                found.append(f"fault '{self}': no {self.target.kind} {index}, there are {limit}")
        count = topology.process_count
        if self.permute is not None and not self.permute.fits(topology):
            found.append(f"fault '{self}': permute must name each of 0..{count - 1} exactly once")
        return found

    def __str__(self) -> str:
        words = [f"step={self.step}", f"kill={self.target}"]
        words += ["lose-ram"] if self.lose_ram else []
        words += [f"permute={self.permute}"] if self.permute else []
        words += [f"signal={self.signal}"] if self.signal != "KILL" else []
        if self.resume_after_s is not None:
            words.append(f"resume-after-s={self.resume_after_s:f}")
        return " ".join([*words, "exact"] if self.exact else words)


def parse_fault(text: str) -> Fault:
    """Return the fault that ``text`` describes. ``parse_fault(str(fault)) == fault``.

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
    return Fault(lose_ram="lose-ram" in flags, exact="exact" in flags, **parsed)  # type: ignore[arg-type]


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


def _permutation(text: str) -> Permutation:
    if text in ("reverse", "swap-slices"):
        return Permutation(text)
    if text.startswith("seed:"):
        return Permutation("seed", seed=_number(text.removeprefix("seed:")))
    if _NUMBER.match(text):
        return Permutation("explicit", new_index=_numbers(text))
    raise ValueError("expected reverse, swap-slices, seed:N or a list like 3,2,1,0")


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
