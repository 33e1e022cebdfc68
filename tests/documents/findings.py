"""What a check is, and how two lists of names are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
Check = Callable[[], Iterable[str]]
"""Yields a line for each finding."""


def checks_of(module: ModuleType) -> list[Check]:
    """Return the functions whose names begin with ``check_``, in their order."""
    functions = [value for _, value in inspect.getmembers(module, inspect.isfunction)]
    own = [each for each in functions if each.__name__.startswith("check_")]
    return sorted(own, key=lambda each: each.__code__.co_firstlineno)


def differing(found: Collection[str], wanted: Collection[str], where: str) -> Iterable[str]:
    """Yield what is in one of the two only. ``where``: the place that ``wanted`` was read from."""
    yield from (f"{each}: missing in {where}" for each in sorted(set(found) - set(wanted)))
    yield from (f"{each}: in {where} only" for each in sorted(set(wanted) - set(found)))
