"""The history of lives that the job continues, and the saves that were rolled back.

Every restore begins a life (an incarnation) from one save, so lives form a tree. A timeline is the
path from its newest life to the root, with the last step of each life on it. A save that is not on
the path was abandoned: another life continued from an earlier step of its life, or none continued
from its life. Pure.
"""

from __future__ import annotations

import msgspec

from emergency_ckpt.core.limits import MAX_LIVES
from emergency_ckpt.types import SaveId


class Life(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A former life: its saves up to ``last_step`` belong to the timeline."""

    incarnation: str
    last_step: int


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The path from the newest known life to the root.

    The names of lives sort by age; ``new_incarnation`` guarantees it.

    Attributes:
      head: the newest life.
      start_step: the step from which it began.
      ancestors: the lives before it, newest first; at least one.
      oldest_step: saves of lives older than all of these belong to the timeline up to this step.
    """

    head: str
    start_step: int
    ancestors: tuple[Life, ...]
    oldest_step: int

    def objection(self, step: int, incarnation: str) -> str:
        """Return why a save does not belong to the timeline; empty when it does, or may."""
        life = life_of(incarnation)
        if not life or life >= self.head:
            return ""
        last_step = self._last_step(life)
        if last_step is not None and step <= last_step:
            return ""
        return f"it was rolled back: incarnation {self.head} continued from step {self.start_step}"

    def _last_step(self, life: str) -> int | None:
        """Return the last step of ``life`` that belongs; None when the life is not on the path."""
        for each in self.ancestors:
            if each.incarnation == life:
                return each.last_step
        is_older = all(life < each.incarnation for each in self.ancestors)
        return self.oldest_step if is_older else None


def life_of(incarnation: str) -> str:
    """Return the life in which a save was made; all demanded saves of one life have the same."""
    return incarnation.partition(".")[0]


def continued(before: Timeline | None, parent: SaveId, incarnation: str) -> Timeline:
    """Return the timeline of a new life that began from ``parent``."""
    left = Life(life_of(parent.incarnation), parent.step)
    older: list[Life] = []
    oldest_step = parent.step
    if before is not None:
        oldest_step = min(oldest_step, before.oldest_step)
        lives = [Life(before.head, parent.step), *before.ancestors]
        older = [
            Life(each.incarnation, min(each.last_step, parent.step))
            for each in lives
            if each.incarnation < left.incarnation
        ]
    lives = [left, *older]
    if len(lives) > MAX_LIVES:
        oldest_step = lives[MAX_LIVES].last_step
    return Timeline(life_of(incarnation), parent.step, tuple(lives[:MAX_LIVES]), oldest_step)


def is_on_way(save: SaveId, life: str, timeline: Timeline | None) -> bool:
    """Return whether ``save`` was made in ``life`` or on the path to it; False when unknown.

    ``timeline``: the newest one; it is that of ``life`` when a restore began that life.
    """
    made_in = life_of(save.incarnation)
    if made_in == life or timeline is None or timeline.head != life:
        return made_in == life
    is_older = bool(made_in) and made_in < life
    return is_older and not timeline.objection(save.step, save.incarnation)


def newest(*timelines: Timeline | None) -> Timeline | None:
    """Return the record with the newest life."""
    return max((each for each in timelines if each is not None), key=_order, default=None)


def _order(timeline: Timeline) -> tuple[str, int, bytes]:
    return timeline.head, -timeline.start_step, msgspec.json.encode(timeline)


def problem_of(timeline: Timeline) -> str:
    """Return the contradiction in a record from outside; empty when there is none."""
    if not timeline.ancestors or len(timeline.ancestors) > MAX_LIVES:
        return "it has no life before its head, or too many"
    return ""
