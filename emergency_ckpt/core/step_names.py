"""Names of step folders, in the formats that Orbax writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from emergency_ckpt.core.limits import MAX_STEP

_NAME = re.compile(r"(?:(.+)_)?([0-9]{1,19})")
"""Orbax's standard format: an optional prefix and underscore, then the number, possibly padded."""

PLAIN = ""
"""Kind of the names that are the number itself, as our own steps have."""


LOOKED_AT_MOST = 10_000
"""Maximum number of folders of each kind that are read in search of complete steps."""


def steps_by_kind(names: Iterable[str]) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return the folder names of each step by kind of name: ``PLAIN``, or an example of the kind.

    Names with one prefix are one kind, padded or not, since numbers outgrow their padding. Names of
    one step are in order of preference.
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
    """Return the folders that may hold each step, in order of preference, plain numbers first."""
    merged: dict[int, tuple[str, ...]] = {}
    for kind in sorted(kinds):  # the plain one first
        for number, names in kinds[kind].items():
            merged[number] = (*merged.get(number, ()), *names)
    return merged


def is_own_name(name: str) -> bool:
    """Return whether ``name`` is the number of a step as this package writes it."""
    match = _NAME.fullmatch(name)
    return match is not None and name == str(int(match[2])) and int(name) <= MAX_STEP


def may_be_unknown_step(name: str) -> bool:
    """Return whether a folder without a step's name may hold a step, and not a step's leftovers."""
    return re.match(r"[0-9]+\.|.*\.orbax-checkpoint-tmp", name) is None
