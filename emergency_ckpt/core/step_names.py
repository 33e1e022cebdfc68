"""Which of the folders that a directory has are steps, by the names that Orbax gives them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from emergency_ckpt.core.save_decision import MAX_STEP

_NAME = re.compile(r"(?:(.+)_)?([0-9]{1,19})")
"""Orbax's standard format: perhaps a prefix and an underscore, then the number, perhaps padded."""

PLAIN = ""
"""The kind of names that are the number itself, as those of our own steps."""


def steps_by_kind(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """The names of steps by number, for each kind of names: ``PLAIN``, or an example of the kind.

    One prefix, with padding or without, is one kind: a number grows longer than its padding. Of two
    names of one step in a kind the one that sorts first counts.
    """
    kinds: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None or int(match[2]) > MAX_STEP:
            continue
        number = int(match[2])
        kind = PLAIN if name == str(number) else f"{match[1]}_<step>" if match[1] else "<000step>"
        kinds.setdefault(kind, {}).setdefault(number, name)
    return kinds


def folders_of(kinds: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
    """The folder of each step. What is named by its plain number goes first."""
    merged: dict[int, str] = {}
    for kind in sorted(kinds, reverse=True):  # the plain one last
        merged.update(kinds[kind])
    return merged


def may_be_unknown_step(name: str) -> bool:
    """Whether a folder that is no step by its name is worth a look: not what a step left behind."""
    return re.match(r"[0-9]+\.|.*\.orbax-checkpoint-tmp", name) is None
