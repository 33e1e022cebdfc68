"""What must come back after an incident, apart from the planner. Pure.

From the lives of a job, the saves that were found whole on ramdisks and in storage, and what each
process said that it had restored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from soak_looks import Save
from soak_truth import expected_digest, expected_position

Binding = Literal["yes", "maybe", "no"]


@dataclasses.dataclass
class Life:
    """One life: what it went on from (or None), its processes, and whether it binds later ones.

    It does when a save of it was whole: then what it had passed over does not come back. ``maybe``:
    it was ended when nobody can tell from outside. ``is_from_nothing``: it saved without a restore,
    so that nothing of the lives before it is on its way. ``is_blind``: it found neither RAM nor
    storage of the job, as where a file system is not mounted, so that it may have any number: it
    binds perhaps at the most.
    """

    number: int
    parent: Save | None
    count: int
    binds: Binding = "no"
    is_from_nothing: bool = False
    is_blind: bool = False

    def has_saved(self, count: int) -> None:
        """Note that so many saves of it were whole."""
        self.binds = "yes" if count > 1 and not self.is_blind else "maybe"


def is_on_way(lives: Mapping[int, Life], head: int, save: Save) -> bool:
    """Whether ``save`` is of ``head``, or of those that it came by, or younger than it."""
    if save.life > head:
        return True
    limit = math.inf
    current = head
    while save.life != current:
        parent = lives[current].parent
        if parent is None:
            return False
        limit = min(limit, parent.step)
        current = parent.life
    return save.step <= limit


def possible_heads(lives: Mapping[int, Life]) -> list[int]:
    """The newest life that binds for sure, and those after it that may."""
    heads: list[int] = []
    for number in sorted(lives, reverse=True):
        if lives[number].binds != "no":
            heads.append(number)
        if lives[number].binds == "yes":
            return heads
    return [*heads, min(lives)] if lives else []


def doubt_lives_from_nothing(lives: Mapping[int, Life], whole: Collection[Save]) -> None:
    """Let lives bind perhaps that came, by others or at once, from one without a restore.

    Of that one and those after it no trace may be left: what it had passed over counts again.
    """
    for life in lives.values():
        root = life
        while root.parent is not None:
            root = lives[root.parent.life]
        is_gone = all(save.life < root.number for save in whole)
        if root.is_from_nothing and life.binds == "yes" and is_gone:
            life.binds = "maybe"


class Bounds(NamedTuple):
    """The step that must come back at the least, or None; and the saves that may."""

    least: int | None
    allowed: frozenset[Save]


def bounds(lives: Mapping[int, Life], whole: Collection[Save]) -> Bounds:
    """What a restore must give, of what was found whole."""
    heads = possible_heads(lives)
    ways = [{save for save in whole if is_on_way(lives, head, save)} for head in heads]
    newest = [
        max((s.step for s in way if s.life == head or not lives[s.life].is_blind), default=None)
        for head, way in zip(heads, ways, strict=True)
    ]
    least = None if None in newest or not newest else min(n for n in newest if n is not None)
    return Bounds(least, frozenset().union(*ways))


def problems_of(
    seen: Sequence[Mapping[str, Any]], lives: Mapping[int, Life], least: int | None
) -> list[str]:
    """What is wrong with what the processes restored, most serious first.

    Args:
      seen: of each process: ``process``, ``step`` and, if that is not None, ``life``, ``digest``,
        ``boxes`` and ``data``.
    """
    problems: list[str] = []
    steps = {each["step"] for each in seen}
    if len(steps) > 1:
        problems.append(f"different steps: {sorted(steps, key=str)}")
    for each in seen:
        step = each["step"]
        if step is None:
            continue
        process, life = each["process"], each["life"]
        if life not in lives:
            problems.append(f"wrong bytes: process {process} has step {step} of no life, {life}")
            continue
        heads = possible_heads(lives)
        if not any(is_on_way(lives, head, Save(step, life)) for head in heads):
            problems.append(f"rolled back: process {process} has step {step} of life {life}")
        if each["digest"] != expected_digest(each["boxes"], step, life):
            problems.append(f"wrong bytes: process {process} at step {step}")
        if each["data"] != expected_position(step, life, process, lives[life].count):
            problems.append(f"wrong iterator: process {process} at step {step}: {each['data']}")
    if least is not None:
        older = sorted({str(step) for step in steps if step is None or step < least})
        if older:
            problems.append(f"older: step {', '.join(older)} and not {least}")
    return sorted(problems, key=_seriousness)


_REFUSALS = (
    *("Unrecoverable", "RestoreFailed", "PersistentTierError", "StorageUnreachable"),
    "HostStateError",  # of a step whose documents are gone, and whose writer nothing names any more
)


def is_refusal(errors: Sequence[str]) -> bool:
    """Whether each of ``errors``, as type and text, says that no step can be restored."""
    return bool(errors) and all(each.partition(":")[0] in _REFUSALS for each in errors)


_ORDER = ("wrong bytes", "wrong iterator", "rolled back", "different steps", "older")


def _seriousness(problem: str) -> int:
    return next((n for n, start in enumerate(_ORDER) if problem.startswith(start)), len(_ORDER))


def result_of(problems: Sequence[str]) -> str:
    """The name of the most serious problem, in one or two words."""
    return problems[0].partition(":")[0] if problems else "recovered"
