"""The step log of a persistent directory: which steps count, and who may write. Pure.

A version of the log is a whole table. Each change is a new version, created only if absent, so of
two writers that have read the same version only one changes it. FORMAT.md has the states.
"""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from emergency_ckpt.core.limits import (
    MAX_INCARNATION_NUMBER,
    MAX_INT,
    MAX_PROCESSES,
    MAX_STEP,
    MAX_VERSION,
    NAME_PATTERN,
)
from emergency_ckpt.core.step_names import is_name_of
from emergency_ckpt.core.timeline import Timeline, newest, number_of
from emergency_ckpt.core.timeline import problem_of as problem_of_chain

State = Literal["complete", "hidden", "removing"]
Claim = Literal["hold", "write", "refuse"]
_WRITER = re.compile(r"[A-Za-z0-9_-]{0,64}")
_INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}|")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step of the table.

    Attributes:
      incarnation: of the save; see ``plain_incarnation`` for a step of plain Orbax.
      state: a ``complete`` step counts, unless the chain excludes the step. A ``hidden`` step was
        rolled back: the files stay, and Orbax does not see the step. The files of a ``removing``
        step are being deleted.
      marker: SHA-256 (hex) of ``marker.json``; empty for a step of plain Orbax.
      processes: number of processes that saved the step; 0 for a step of plain Orbax.
      stateful: some host state of the step is not null.
      saved_s: Unix time by the writer's clock, for people and for policies of seconds.
      folder: the name of the folder where the name is not the number.
      metrics: as given to ``save``.
      lives: number of lives in a row that began from this step in storage, without a newer save.
    """

    step: int
    incarnation: str
    state: State = "complete"
    marker: str = ""
    processes: int = 0
    stateful: bool = False
    size_bytes: int = 0
    saved_s: float = 0.0
    folder: str = ""
    metrics: dict[str, Any] | None = None
    lives: int = 0

    @property
    def is_plain(self) -> bool:
        """Return True when plain Orbax wrote the step."""
        return not self.marker

    @property
    def own_folder(self) -> str:
        """Return the name of the folder of the complete step; in a bucket, of any step."""
        return self.folder or str(self.step)

    @property
    def hidden_folder(self) -> str:
        """Return the name of the folder of the hidden step on a file system."""
        return f"{self.step}.rolled-back-{self.incarnation}"


class Table(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One version of the log.

    Attributes:
      number: of the version, as in its file's name.
      run_id, from_dir: the run that saves there; True when its id is derived from the directory.
      incarnation: the life that wrote this version. Lives with smaller numbers write no more.
      writer: distinguishes two writers in one life, such as two drains; empty for a job.
      chain: the binding chain; None before the first restore.
      steps: at most one entry for each number, oldest step first.
      greatest: the greatest number that a life took at its start, even a life without a save.
    """

    number: int
    run_id: str
    from_dir: bool
    incarnation: str
    writer: str = ""
    chain: Timeline | None = None
    steps: tuple[Entry, ...] = ()
    greatest: int = 0

    def rejection_reason(self, entry: Entry) -> str:
        """Return why the chain excludes ``entry``; empty when the chain does not."""
        chain = self.chain
        return "" if chain is None else chain.rejection_reason(entry.step, entry.incarnation)

    def counting(self) -> list[Entry]:
        """Return the entries that count, oldest step first."""
        left_steps = {e.step for e in self.left()}
        return [e for e in self.steps if e.state == "complete" and e.step not in left_steps]

    def left(self) -> list[Entry]:
        """Return the complete entries that the chain excludes, and that are to be hidden."""
        chain = self.chain
        if chain is None:
            return []
        lives = {e.incarnation for e in self.steps}
        last = {incarnation: chain.last_step(incarnation) for incarnation in lives}
        return [e for e in self.steps if e.state == "complete" and e.step > last[e.incarnation]]

    def of(self, step: int) -> Entry | None:
        """Return the entry of ``step``."""
        place = bisect_left(self.steps, step, key=operator.attrgetter("step"))
        entry = self.steps[place] if place < len(self.steps) else None
        return entry if entry is not None and entry.step == step else None

    def complete(self, step: int) -> Entry | None:
        """Return the entry of ``step`` if it is complete."""
        entry = self.of(step)
        return entry if entry is not None and entry.state == "complete" else None


class LogWriter(NamedTuple):
    """A writer, by the fields of ``Table`` that are the writer's."""

    run_id: str
    from_dir: bool
    incarnation: str
    writer: str = ""


def decide_claim(there: Table | None, mine: LogWriter, *, held: bool = False) -> tuple[Claim, str]:
    """Return whether ``mine`` may write after ``there``: yes, once it is on record, or no.

    Of two lives of one run the life with the greater number may write, because it knew of the
    other. Of two lives with one number, neither knew of the other, and the life on record may
    write. ``held``: ``mine`` was on record.
    """
    if there is None:
        return "write", "no run has saved there"
    if there.run_id != mine.run_id and not (there.from_dir and mine.from_dir):
        return "refuse", f"run {there.run_id!r} saves there, and this is run {mine.run_id!r}"
    if there.incarnation == mine.incarnation:
        if there.writer == mine.writer:
            return "hold", "this incarnation is on record there"
        is_over = bool(mine.writer) and held
        return ("refuse" if is_over else "write"), "another writer of this incarnation has come"
    newer_by = number_of(there.incarnation) - number_of(mine.incarnation)
    if newer_by < 0:
        return "write", f"incarnation {there.incarnation} of this run is over"
    relation = "is newer than" if newer_by else "has the same number, without knowledge of,"
    return "refuse", (
        f"another job with this run's name, {there.run_id!r}, saves there: its incarnation "
        f"{there.incarnation} {relation} {mine.incarnation} of this one"
    )


def begun(there: Table | None, mine: LogWriter) -> Table:
    """Return the next version, with ``mine`` on record and the steps of ``there``."""
    return Table(
        number=1 if there is None else there.number + 1,
        run_id=mine.run_id,
        from_dir=mine.from_dir,
        incarnation=mine.incarnation,
        writer=mine.writer,
        chain=None if there is None else there.chain,
        steps=() if there is None else there.steps,
        greatest=0 if there is None else there.greatest,
    )


def reserved(table: Table, incarnation: str) -> Table:
    """Return ``table`` with the number of ``incarnation`` taken, and no other change.

    The run on record may still write. Later lives take greater numbers, even lives that know
    nothing of the RAM of ``incarnation``.
    """
    greatest = max(table.greatest, number_of(incarnation))
    return msgspec.structs.replace(table, greatest=greatest)


def listing(table: Table, *added: Entry) -> Table:
    """Return ``table`` with ``added`` in the place of entries of the same numbers."""
    entries = {e.step: e for e in (*table.steps, *added)}
    return msgspec.structs.replace(table, steps=tuple(entries[step] for step in sorted(entries)))


def without(table: Table, entries: Iterable[Entry]) -> Table:
    """Return ``table`` without ``entries``; another save's entry of the same number stays."""
    gone = {(e.step, e.incarnation) for e in entries}
    remaining = (e for e in table.steps if (e.step, e.incarnation) not in gone)
    return msgspec.structs.replace(table, steps=tuple(remaining))


def in_state(state: State, entries: Iterable[Entry]) -> list[Entry]:
    """Return ``entries`` in another state."""
    return [msgspec.structs.replace(entry, state=state) for entry in entries]


def with_lives(table: Table, lives: int, step: int, incarnation: str) -> Table:
    """Return ``table`` with the number of ``lives`` that began from a step, if listed."""
    entry = table.of(step)
    if entry is None or entry.incarnation != incarnation:
        return table
    return listing(table, msgspec.structs.replace(entry, lives=lives))


def given_to(table: Table, run_id: str | None) -> Table:
    """Return ``table`` with the run ``run_id`` on record; None: with the same run."""
    if run_id in (None, table.run_id):
        return table
    return msgspec.structs.replace(table, run_id=run_id, from_dir=False)


def without_lives(table: Table) -> Table:
    """Return ``table`` after a newer complete save: no older step is restored in a row any more.

    A hidden step keeps the number, which may be the reason why the step was hidden.
    """
    restored = (e for e in table.steps if e.lives and e.state == "complete")
    return listing(table, *(msgspec.structs.replace(e, lives=0) for e in restored))


def following(table: Table, chain: Timeline | None) -> Table:
    """Return ``table`` with the newer of both chains."""
    return msgspec.structs.replace(table, chain=newest(table.chain, chain))


def greatest_number(table: Table | None) -> int:
    """Return the greatest incarnation that the log names; 0 without one."""
    if table is None:
        return 0
    lives = [table.incarnation, *(e.incarnation for e in table.steps)]
    if table.chain is not None:
        lives.append(table.chain.head)
    return max(table.greatest, *map(number_of, lives))


def problem_of(table: Table) -> str:
    """Return the fault of a table from outside; empty when it has none."""
    names = (NAME_PATTERN, table.run_id), (_WRITER, table.writer), (_INCARNATION, table.incarnation)
    is_bounded = 1 <= table.number <= MAX_VERSION and 0 <= table.greatest <= MAX_INCARNATION_NUMBER
    if not is_bounded or number_of(table.incarnation) == 0:
        return "its number or incarnation is out of bounds"
    if not all(pattern.fullmatch(name) for pattern, name in names):
        return "its run_id, writer or incarnation is no valid name"
    if table.chain is not None and (problem := problem_of_chain(table.chain)):
        return f"its chain is damaged: {problem}"
    if any(a.step >= b.step for a, b in itertools.pairwise(table.steps)):
        return "its steps are not in order"
    return next(filter(None, map(_problem_of_entry, table.steps)), "")


def _problem_of_entry(entry: Entry) -> str:
    is_bounded = 0 <= entry.step <= MAX_STEP and 0 <= entry.processes <= MAX_PROCESSES
    is_bounded = is_bounded and 0 <= entry.lives <= MAX_INCARNATION_NUMBER
    is_bounded = is_bounded and 0 <= entry.size_bytes <= MAX_INT
    if not is_bounded or _DIGEST.fullmatch(entry.marker) is None:
        return f"step {entry.step}: a number or digest is out of bounds"
    if NAME_PATTERN.fullmatch(entry.incarnation) is None:
        return f"step {entry.step}: its incarnation is not a plain name"
    if entry.folder and not is_name_of(entry.step, entry.folder):
        return f"step {entry.step}: its folder is no name of this step"
    return ""
