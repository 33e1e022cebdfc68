"""Which of the folders that a directory has are steps, by the names that Orbax gives them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from emergency_ckpt.core.limits import MAX_STEP

_NAME = re.compile(r"(?:(.+)_)?([0-9]{1,19})")
"""Orbax's standard format: perhaps a prefix and an underscore, then the number, perhaps padded."""

PLAIN = ""
"""The kind of names that are the number itself, as those of our own steps."""


LOOKED_AT_MOST = 10_000
"""So many folders of each kind are looked at in search of whole steps."""


def steps_by_kind(names: Iterable[str]) -> dict[str, dict[int, tuple[str, ...]]]:
    """The names of steps by number, for each kind of names: ``PLAIN``, or an example of the kind.

    One prefix, with padding or without, is one kind: a number grows longer than its padding. Names
    of one step are in order of preference.
    """
    kinds: dict[str, dict[int, tuple[str, ...]]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None or int(match[2]) > MAX_STEP:
            continue
        number = int(match[2])
        kind = PLAIN if name == str(number) else f"{match[1]}_<step>" if match[1] else "<000step>"
        steps = kinds.setdefault(kind, {})
        steps[number] = (*steps.get(number, ()), name)
    return kinds


def folders_of(kinds: Mapping[str, Mapping[int, Sequence[str]]]) -> dict[int, tuple[str, ...]]:
    """The folders that may be each step, in order of preference: the plain number goes first."""
    merged: dict[int, tuple[str, ...]] = {}
    for kind in sorted(kinds):  # the plain one first
        for number, names in kinds[kind].items():
            merged[number] = (*merged.get(number, ()), *names)
    return merged


def is_own_name(name: str) -> bool:
    """Whether ``name`` is the number of a step as this package writes it."""
    match = _NAME.fullmatch(name)
    return match is not None and name == str(int(match[2])) and int(name) <= MAX_STEP


def in_order_of_looks(listed: Mapping[int, bool], below: int | None) -> tuple[list[int], int]:
    """The steps to look at, newest first, and the number of those that are too many.

    Args:
      listed: for each step, whether there is a folder of ours beside it. Neither kind takes the
        place of the other.
      below: only steps before this one; None: all.
    """
    steps = sorted((step for step in listed if below is None or step < below), reverse=True)
    ours = [step for step in steps if listed[step]]
    others = [step for step in steps if not listed[step]]
    looks = ours[:LOOKED_AT_MOST] + others[:LOOKED_AT_MOST]
    return sorted(looks, reverse=True), len(steps) - len(looks)


def may_be_unknown_step(name: str) -> bool:
    """Whether a folder that is no step by its name is worth a look: not what a step left behind."""
    return re.match(r"[0-9]+\.|.*\.orbax-checkpoint-tmp", name) is None
