"""Incarnations, the chain of those that the job continues, and the saves that were rolled back.

An incarnation is one life of the job, renewed by every start and every restore. Its name begins
with a number, one more than the greatest number that any process knew; clocks decide nothing. A
restore begins a life from one save, so lives form a tree. A timeline is the path from the newest
life to the root, with the last step of each life on the path. A save off the path was abandoned:
another life continued from an earlier step of the save's life, or no life continued from it. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import msgspec

from emergency_ckpt.core.limits import MAX_INCARNATION_NUMBER, MAX_LIVES, MAX_STEP, NAME_PATTERN
from emergency_ckpt.core.wording import short_text
from emergency_ckpt.errors import CorruptData, RestoreFailed
from emergency_ckpt.types import SaveId

_NUMBER = re.compile(r"([0-9]{12})-")
_ORBAX = "-orbax-"
_PLAIN = re.compile(r"[0-9]{12}-orbax(-[0-9a-f]+)?")


def new_incarnation(greatest: int, nonce: str) -> str:
    """Return the name of a life that begins after the known lives.

    RestoreFailed when there is no greater number: no job begins so many lives.

    Args:
      greatest: the greatest number of a life that any process knows; 0 without any.
      nonce: 16 random hexadecimal digits: two lives that did not know of each other differ.
    """
    if greatest >= MAX_INCARNATION_NUMBER:
        raise RestoreFailed(
            "begin",
            "an incarnation",
            f"some file names incarnation {greatest}, and there is no greater number",
            hint="find it with `eckpt ls`: no job begins so many; remove that file, or take"
            " another run_id and dir",
        )
    return f"{max(greatest, 0) + 1:012d}-{nonce}"


def number_of(incarnation: str) -> int:
    """Return the number of a life; 0 for a name without one. Names sort as their numbers."""
    match = _NUMBER.match(incarnation)
    return 0 if match is None else int(match[1])


def life_of(incarnation: str) -> str:
    """Return the life in which a save was made; all forced saves of one life have the same."""
    return incarnation.partition(".")[0]


def is_plain(incarnation: str) -> bool:
    """Return whether the step of ``incarnation`` was written by plain Orbax."""
    return _PLAIN.fullmatch(incarnation) is not None


def plain_incarnation(number: int, digest: str) -> str:
    """Return the incarnation of a step that plain Orbax wrote.

    Args:
      number: of the newest life on record when the step was first seen: the step sorts after that
        life. 0: before every life.
      digest: hexadecimal digits of the step's files, which differ for another step of the number.
    """
    return f"{number:012d}{_ORBAX}{digest}"


def is_same_save(incarnation: str, other: str) -> bool:
    """Return whether two incarnations of one step are equal, or of the same files of plain Orbax.

    RAM and the log may have first seen these files at different times.
    """
    digest, digest_of_other = incarnation.partition(_ORBAX)[2], other.partition(_ORBAX)[2]
    return incarnation == other or (bool(digest) and digest == digest_of_other)


class Ancestor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A former incarnation: its saves up to ``last_step`` belong to the timeline."""

    incarnation: str
    last_step: int


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The path from the newest known life to the root.

    Attributes:
      head: the newest life.
      start_step: the step from which the newest life began; -1 when it began from nothing.
      ancestors: the earlier lives, newest first; none when the newest life began from nothing.
      oldest_step: saves of lives older than all of these belong to the timeline up to this step;
        -1 when the oldest of these lives began from nothing.
    """

    head: str
    start_step: int
    ancestors: tuple[Ancestor, ...]
    oldest_step: int

    def rejection_reason(self, step: int, incarnation: str) -> str:
        """Return why a save does not belong to the timeline; empty for a save that may belong."""
        if step <= self.last_step(incarnation):
            return ""
        if number_of(incarnation) == self._number:
            return f"incarnation {self.head} has the same number, and neither knew of the other"
        if self.leaves_behind(incarnation):
            return f"it was left behind: {self._began_from_nothing} saved without a restore"
        return f"it was rolled back: incarnation {self.head} continued from step {self.start_step}"

    def last_step(self, incarnation: str) -> int:
        """Return the last step of a life that belongs, or may belong; -1 without such a step."""
        own, number = life_of(incarnation), number_of(incarnation)
        if not own or own == self.head or number > self._number:
            return MAX_STEP
        if number == self._number:
            return MAX_STEP if is_plain(own) else -1
        return self._last_step(own)

    def leaves_behind(self, incarnation: str) -> bool:
        """Return whether the timeline began from nothing after the life of a save.

        Such a save was not rolled back: nobody returned to a step before it.
        """
        oldest = number_of(self._began_from_nothing)
        return self.oldest_step < 0 and number_of(incarnation) < oldest

    @property
    def _number(self) -> int:
        return number_of(self.head)

    @property
    def _began_from_nothing(self) -> str:
        return self.ancestors[-1].incarnation if self.ancestors else self.head

    def _last_step(self, incarnation: str) -> int:
        """Return the last step of an older ``incarnation`` that belongs; -1 without such a step."""
        number = number_of(incarnation)
        links = [link for link in self.ancestors if number_of(link.incarnation) <= number]
        if not links:
            return self.oldest_step
        if is_plain(incarnation):
            return links[0].last_step
        same = [link for link in links if number_of(link.incarnation) == number]
        own = [link for link in same if link.incarnation == incarnation]
        # No chain names a first life: a step of plain Orbax that was seen beside the life does.
        if not own and all(is_plain(link.incarnation) for link in same):
            own = same
        return own[0].last_step if own else -1


def continued(before: Timeline | None, parent: SaveId | None, incarnation: str) -> Timeline:
    """Return the timeline of a new life that began from ``parent``.

    ``parent``: None for a life that saved without a restore. Such a life began from nothing, and no
    older save belongs to the life.
    """
    if parent is None:
        return Timeline(life_of(incarnation), -1, (), -1)
    parent_life = Ancestor(life_of(parent.incarnation), parent.step)
    older: list[Ancestor] = []
    oldest_step = parent.step
    # A life that began from nothing after the parent says nothing of the lives before the parent.
    if before is not None and not before.leaves_behind(parent_life.incarnation):
        oldest_step = min(oldest_step, before.oldest_step)
        lives = [Ancestor(before.head, parent.step), *before.ancestors]
        older = [
            Ancestor(ancestor.incarnation, min(ancestor.last_step, parent.step))
            for ancestor in lives
            if _precedes(ancestor.incarnation, parent_life.incarnation)
        ]
    lives = [parent_life, *older]
    if len(lives) > MAX_LIVES:
        oldest_step = lives[MAX_LIVES].last_step
    return Timeline(life_of(incarnation), parent.step, tuple(lives[:MAX_LIVES]), oldest_step)


def _precedes(incarnation: str, other: str) -> bool:
    """Return whether ``incarnation`` may precede ``other``; of equal numbers plain is later."""
    numbers = number_of(incarnation), number_of(other)
    is_plain_later = is_plain(other) and not is_plain(incarnation)
    return numbers[0] < numbers[1] or (numbers[0] == numbers[1] and is_plain_later)


def is_on_way(save: SaveId, incarnation: str, timeline: Timeline | None) -> bool:
    """Return whether ``save`` was made in ``incarnation`` or on the path to it; False when unknown.

    ``timeline``: the newest timeline, whose head is ``incarnation`` if a restore began that life.
    """
    made_in = life_of(save.incarnation)
    if made_in == incarnation or timeline is None or timeline.head != incarnation:
        return made_in == incarnation
    is_older = bool(made_in) and number_of(made_in) < number_of(incarnation)
    return is_older and not timeline.rejection_reason(save.step, save.incarnation)


def newest_step(saves: Iterable[SaveId], timeline: Timeline | None) -> int:
    """Return the newest step of ``saves`` that belongs to the timeline; -1 without any."""
    counts = (
        save.step
        for save in saves
        if timeline is None or not timeline.rejection_reason(save.step, save.incarnation)
    )
    return max(counts, default=-1)


def newest(*timelines: Timeline | None, complete: Iterable[SaveId] = ()) -> Timeline | None:
    """Return the record with the newest life.

    Lives have one number if neither knew of the other. Of these the life counts on whose way the
    newest of ``complete`` is, the saves that were complete; then the name decides.
    """
    records = {record for record in timelines if record is not None}
    greatest = max((number_of(record.head) for record in records), default=0)
    last = [record for record in records if number_of(record.head) == greatest]
    saves = frozenset(complete) if len(last) > 1 else ()

    def order(record: Timeline) -> tuple[int, str, int, bytes]:
        newest_save = newest_step(saves, record)
        return newest_save, record.head, -record.start_step, msgspec.json.encode(record)

    return max(last, key=order, default=None)


def problem_of(timeline: Timeline) -> str:
    """Return the contradiction in a record from outside; empty when there is none."""
    if len(timeline.ancestors) > MAX_LIVES:
        return "it has too many lives before its head"
    lives = [timeline.head, *(ancestor.incarnation for ancestor in timeline.ancestors)]
    if not number_of(timeline.head) or any(a <= b for a, b in itertools.pairwise(lives)):
        return "its lives are not numbered from the newest to the oldest"
    return ""


def check_save(save: SaveId) -> None:
    """Raise ``CorruptData`` unless the step and both names of ``save`` are in bounds."""
    if not 0 <= save.step <= MAX_STEP:
        problem, actual = "step out of bounds", short_text(save.step)
    elif not NAME_PATTERN.fullmatch(save.run_id):
        problem, actual = "run id is not a plain name", save.run_id
    elif not NAME_PATTERN.fullmatch(save.incarnation):
        problem, actual = "incarnation is not a plain name", save.incarnation
    else:
        return
    raise CorruptData("decode", "identity of a save", problem, actual=actual[:200])
