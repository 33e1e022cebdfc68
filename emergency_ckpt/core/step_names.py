"""Names that Orbax writes: of step folders, in its formats, of their items and files. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from emergency_ckpt.core.limits import MAX_LABEL_CHARS, MAX_STEP, NAME_PATTERN

_T = TypeVar("_T")

METRICS: Final = "metrics"
"""The item with the metrics of a step, and its only file."""

_NAME = re.compile(r"(?:(.+)_)?([0-9]{1,19})")
"""Orbax's standard format: an optional prefix and underscore, then the number, possibly padded."""

PLAIN = ""
"""Kind of the names that are the number itself."""


def is_format(of_zero: str) -> bool:
    """Return whether steps can be named in a format, which is given as its name of step 0."""
    match = _NAME.fullmatch(of_zero)
    return match is not None and int(match[2]) == 0 and NAME_PATTERN.fullmatch(of_zero) is not None


def name_of(step: int, of_zero: str) -> str:
    """Return the name of a step's folder in a format: ``ckpt_00000`` has five digits, or more."""
    prefix = of_zero.rstrip("0")
    return f"{prefix}{step:0{len(of_zero) - len(prefix)}d}"


def is_name_of(step: int, name: str) -> bool:
    """Return whether ``name`` is one that Orbax gives to ``step``, and no path elsewhere."""
    is_name = len(name) <= MAX_LABEL_CHARS and not set(name) & {"/", "\\", "\0"}
    return is_name and any(step in steps for steps in steps_by_kind([name]).values())


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
    """Return whether ``name`` is the number of a step, as the folder of its documents has it."""
    match = _NAME.fullmatch(name)
    return match is not None and name == str(int(match[2])) and int(name) <= MAX_STEP


def may_be_unknown_step(name: str) -> bool:
    """Return whether a folder without a step's name may hold a step, and not a step's leftovers."""
    return re.match(r"[0-9]+\.|.*\.orbax-checkpoint-tmp", name) is None


def is_item_name(name: str) -> bool:
    """Return whether an item may have this name: of a folder right below the step, never hidden."""
    is_one = name.isprintable() and "/" not in name and not name.startswith(".")
    return is_one and 0 < len(name.encode()) <= MAX_LABEL_CHARS


def leaves_by_item(items: Collection[str], leaves: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Return the leaves of a state by Orbax's items with its arrays, and by their paths in these.

    A single item has the whole state. Of several items each has the leaves below its name; leaves
    that are in no item are left out.
    """
    if len(items) == 1:
        return {name: dict(leaves) for name in items}
    by_item: dict[str, dict[str, _T]] = {name: {} for name in items}
    for path, leaf in leaves.items():
        name, _, below = path.partition("/")
        if name in by_item:
            by_item[name][below] = leaf
    return by_item


STEP_METADATA = "_CHECKPOINT_METADATA"
"""The document of a step, which its manager writes."""

COMMITTED = "commit_success.txt"
"""In a bucket, the name of the objects by which finished steps and items are recognised."""

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
"""In a file system, the end of the name of a step's folder before its commit."""

OWN_TEMPORARY = f"{TEMPORARY_SUFFIX}-eckpt-"
"""This package's end of that name, before the name of the attempt: so the folder's owner is known,
and no attempt writes into the folder of another."""

MANIFEST = "manifest.ocdbt"
"""The root of an item's database. TensorStore chooses the name."""

TREE = "_METADATA"
"""The document of an item with arrays, which has the item's tree."""

ROOT_METADATA = "metadata"
"""The folder beside the steps with the metadata that were given to Orbax's manager."""


def commits_of(items: Iterable[str]) -> list[str]:
    """Return the files by which Orbax counts a step in a bucket, in the order of their creation."""
    return [*(f"{item}/{COMMITTED}" for item in items), COMMITTED]
