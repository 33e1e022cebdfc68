"""Copies of the parts of one save by the units that can be lost, such as hosts. Exact, pure.

A loss is fatal when it includes every unit that holds some part. So the smallest fatal losses are
the smallest sets of holders of a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Survival:
    """The losses that one save survives.

    Attributes:
      parts_by_copies: number of parts by the number of units that hold each.
      may_fail: any so many units may be lost; -1 when a part is held nowhere.
      fatal_alone: the units of which each alone holds a part, sorted.
      fatal_pairs: number of pairs of units whose loss is fatal, of ``pairs``.
    """

    parts_by_copies: Mapping[int, int]
    may_fail: int
    fatal_alone: tuple[str, ...]
    fatal_pairs: int
    pairs: int


def survival_of(holders: Iterable[frozenset[str]], units: int) -> Survival:
    """Return what a save survives whose parts have these holders, of so many units.

    Without parts nothing can be lost.
    """
    sets = Counter(holders)
    sizes = Counter[int]()
    for held_by, count in sets.items():
        sizes[len(held_by)] += count
    alone = sorted(unit for held_by in sets if len(held_by) == 1 for unit in held_by)
    fatal = set(alone)
    with_one = comb(units, 2) - comb(units - len(fatal), 2)
    pairs = sum(len(held_by) == 2 and not held_by & fatal for held_by in sets)
    return Survival(
        parts_by_copies=dict(sorted(sizes.items())),
        may_fail=min(sizes, default=units + 1) - 1,
        fatal_alone=tuple(alone),
        fatal_pairs=comb(units, 2) if 0 in sizes else with_one + pairs,
        pairs=comb(units, 2),
    )


def holders_of_parts(held: Mapping[str, Iterable[Hashable]]) -> dict[Hashable, frozenset[str]]:
    """Return the units that hold each part, from the parts that each unit holds."""
    found: dict[Hashable, set[str]] = {}
    for unit, parts in held.items():
        for part in parts:
            found.setdefault(part, set()).add(unit)
    return {part: frozenset(units) for part, units in found.items()}
