"""The folders of steps: their names, and which folders Orbax wrote. Does not import Orbax."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from emergency_ckpt.core.step_names import (
    PLAIN,
    ROOT_METADATA,
    STEP_METADATA,
    TREE,
    folders_of,
    may_be_unknown_step,
    steps_by_kind,
)
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage.directory import StorageDirectory, is_there
from emergency_ckpt.storage.marker import HOST_STATE

ITEMS = ("default", "state", "items")
"""Items in which Orbax, its emergency manager and MaxText keep arrays; the first item counts."""

INSPECTED_AT_ONCE = 16
INSPECTED_AT_MOST = 10_000
"""So many folders are looked at in search of the kinds of names."""

_UNKNOWN_TRIED = 16
_ITEMS_TRIED = 64
_INSPECTED = 4 * INSPECTED_AT_ONCE


class StepFolders:
    """Finds the folders of a directory that are steps, by their names, which the job chooses.

    All methods block for storage, until ``deadline_s``; None: each call has a deadline of its own.
    """

    def __init__(self, storage: StorageDirectory, deadline_s: float | None) -> None:
        self._storage = storage
        self._deadline_s = deadline_s

    def steps(self, names: Collection[str], listed: Collection[str]) -> dict[int, tuple[str, ...]]:
        """Return the folders that may be each step, in order of preference.

        ``names``: of everything in the directory. ``listed``: the names of steps in the log, which
        are left out.

        Raises:
          PersistentTierError: there are steps, but no valid name of a step, or names of several
            jobs.
        """
        others = set(names) - set(listed)
        kinds = steps_by_kind(others)
        doubtful = {
            kind: [name for number in sorted(steps, reverse=True) for name in steps[number]]
            for kind, steps in kinds.items()
            if kind != PLAIN
        }
        real = self._kinds_with_steps(doubtful)
        if len(real) > 1:
            raise self._error(f"it has steps of several kinds: {', '.join(real)}")
        kinds = {kind: kinds[kind] for kind in kinds if kind == PLAIN or kind in real}
        if not kinds and len(others) == len(set(names)):
            self._refuse_unknown(names)
        return folders_of(kinds)

    def _kinds_with_steps(self, doubtful: Mapping[str, Sequence[str]]) -> list[str]:
        """Return, sorted, at most two of the kinds of names of which Orbax wrote a folder.

        ``doubtful``: the folders of each kind, newest first. The newest folders of all kinds are
        checked first: in a real kind these are steps.
        """
        kinds: set[str] = set()

        def shows_new_kind(look: tuple[str, str]) -> bool:
            kind, name = look
            return kind not in kinds and self._is_step(name)

        looks = islice(_by_rank(doubtful), INSPECTED_AT_MOST)
        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-kinds") as pool:
            while some := list(islice(looks, _INSPECTED)):
                answers = pool.map(shows_new_kind, some)
                kinds |= {kind for (kind, _), yes in zip(some, answers, strict=True) if yes}
                if len(kinds) in (2, len(doubtful)):
                    break
        return sorted(kinds)

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        candidates = sorted(
            n for n in names if n not in (HOST_STATE, ROOT_METADATA) and may_be_unknown_step(n)
        )
        for name in candidates[-_UNKNOWN_TRIED:]:
            if self._is_step(name):
                raise self._error(
                    f"{name} is a step of Orbax, but its name has no number at its end"
                )

    def has_items(self, name: str) -> bool:
        """Return True when Orbax has written any item into a folder.

        A description of arrays without any other file is no item, since the arrays are missing.
        """
        below = sorted(self._storage.names_in(name, self._deadline_s))
        if TREE in below:
            return len(below) > 1
        for item in below[:_ITEMS_TRIED]:
            folder = f"{name}/{item}"
            is_described = self._storage.has_file(f"{folder}/{TREE}", self._deadline_s)
            if is_described and self._storage.names_in(folder, self._deadline_s) != {TREE}:
                return True
        return False

    def _is_step(self, name: str) -> bool:
        """Return True when Orbax wrote the folder."""
        files = [STEP_METADATA, TREE, *(f"{item}/{TREE}" for item in ITEMS)]
        paths = [self._storage.path / name / file for file in files]
        return self._storage.do(
            "inspect", f"/{name}", lambda: any(map(is_there, paths)), self._deadline_s
        )

    def _error(self, problem: str) -> PersistentTierError:
        hint = "give each job a directory of its own, with names such as 40, 000040 or name_40"
        return PersistentTierError("list", str(self._storage.path), problem, hint=hint)


def _by_rank(doubtful: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield each kind with its first name, then each kind with its second name, and so on."""
    rank, remaining = 0, doubtful
    while remaining := {kind: names for kind, names in remaining.items() if rank < len(names)}:
        for kind, names in remaining.items():
            yield kind, names[rank]
        rank += 1
