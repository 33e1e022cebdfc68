"""Which life went on from what, as the simulation itself saw it: no name of the product is ordered.

The product orders lives by names that it makes. Whether these are in the right order is judged
here, by the numbers that the simulation gives to lives and by what each of them could know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

Save = tuple[str, int]
"""(incarnation, step)."""


class Tags(dict[str, int]):
    """Incarnation -> the number of its life, also of the part that a forced save adds.

    Attributes:
      parents: the number of a life -> the (life, step) from which the life went on.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        super().__init__(known or {})
        self.parents: dict[int, tuple[int, int]] = {}

    def __missing__(self, incarnation: str) -> int:
        """Return the number of the life whose forced save has ``incarnation``."""
        life = life_of(incarnation)
        if life == incarnation:
            raise KeyError(incarnation)
        return self[life]

    def source(self, save: Save) -> int:
        """Return the number of the life that made the state of ``save``.

        A life that ends well brings the step from which the life went on to storage, by a name of
        its own.
        """
        number = self[save[0]]
        while number in self.parents and self.parents[number][1] == save[1]:
            number = self.parents[number][0]
        return number

    def find(self, incarnation: str) -> int | None:
        """Return the number of the life of ``incarnation``; None when it is unknown."""
        return self.get(life_of(incarnation))


class Lives:
    """All lives of a history so far.

    ``tags``: the number of the life that had an incarnation; a life has one from its start and one
    from its restore, and grows while it runs.

    Attributes:
      binding: incarnations that rolled others back: one save of theirs was complete, or a record of
        it was found.
    """

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._older: dict[int, frozenset[str]] = {}
        self._parents = tags.parents
        self._from_nothing: set[int] = set()
        self.binding: set[str] = set()

    def begin(self, number: int, known: Iterable[str]) -> None:
        """Note a life that finds the incarnations ``known``, and so what those had found."""
        found = {life_of(name) for name in known} & self._tags.keys()
        self._older[number] = frozenset(found.union(*map(self.older_than, found)))

    def go_on(self, number: int, parent: tuple[int, int] | None, *, asked: bool) -> None:
        """Note from which (life, step) a life went on. ``asked``: it restored, or found nothing."""
        if parent is not None:
            self._parents[number] = parent
            names = {name for name, tag in self._tags.items() if tag == parent[0]}
            self.begin(number, self._older[number].union(names))
        elif not asked:
            self._from_nothing.add(number)

    def maker_of(self, save: Save) -> tuple[int, int]:
        """Return the life whose step has the bytes of ``save``, and the step.

        A life that saves the step it went on from, as for storage, saves another life's bytes.
        """
        number, step = self._tags[life_of(save[0])], save[1]
        while True:
            parent = self._parents.get(number)
            if parent is None or parent[1] != step or parent[0] == number:
                return number, step
            number = parent[0]

    def older_than(self, incarnation: str) -> frozenset[str]:
        """Return the incarnations that the life of ``incarnation`` must come after."""
        return self._older.get(self._tags[life_of(incarnation)], frozenset())

    def knows(self, number: int, other: int) -> bool:
        """Return whether the life ``number`` must come after all of the life ``other``."""
        every = {name for name, tag in self._tags.items() if tag == other}
        return bool(every) and every <= self._older.get(number, frozenset())

    def is_on_way(self, head: str, save: Save) -> bool | None:
        """Return whether ``save`` counts for who goes on from the life ``head``.

        It does when its life is younger, and when it is on the path to ``head``. None: the two
        lives could not know of each other, or a start that found nothing is between them.
        """
        head, life = life_of(head), life_of(save[0])
        number, tag = self._tags[head], self._tags[life]
        if number == tag or head in self.older_than(life):
            return True
        if life not in self.older_than(head):
            return None
        limit = math.inf
        while number != tag:
            parent = self._parents.get(number)
            if parent is None:
                return self._is_on_way_of_root(number, life)
            number, limit = parent[0], min(limit, parent[1])
        return save[1] <= limit

    def _is_on_way_of_root(self, root: int, life: str) -> bool | None:
        if life in self._older.get(root, frozenset()):
            return False if root in self._from_nothing else None
        names = {name for name, tag in self._tags.items() if tag == root}
        return False if names & self.older_than(life) else None

    def counts(self, save: Save, reach: Iterable[str]) -> bool:
        """Return whether every restore must accept ``save``.

        ``reach``: incarnations of which the restore can find a trace. A life that could not know of
        the save's, nor the other way, may win over it, if it is among these.
        """
        traces = self._tags.keys() & {life_of(name) for name in reach}
        near = {name for each in traces for name in (each, *self.older_than(each))}
        for head in self.binding:
            answer = self.is_on_way(head, save)
            is_apart = head not in self.older_than(save[0]) and (
                life_of(save[0]) not in self.older_than(head)
            )
            if answer is False or (answer is None and (not is_apart or head in near)):
                return False
        return True

    def went_on_apart(self, save: Save, killer: int, heads: Iterable[str]) -> bool:
        """Return whether one of ``heads`` has ``save`` on its way, apart from the life ``killer``.

        Of two lives that could not know of each other, either may win.
        """
        names = {name for name, tag in self._tags.items() if tag == killer}
        return any(
            self.is_on_way(head, save)
            and not names & {head, *self.older_than(head)}
            and head not in self._older.get(killer, frozenset())
            for head in heads
        )

    def is_rolled_back(self, save: Save, heads: Iterable[str]) -> bool:
        """Return whether the newest of ``heads``, whose records are left, excludes ``save``."""
        heads = set(heads)
        newest = [head for head in heads if heads - {head} <= self.older_than(head)]
        return bool(newest) and self.is_on_way(newest[0], save) is False


def life_of(incarnation: str) -> str:
    """Return the life of an incarnation; forced saves add a part of their own."""
    return incarnation.partition(".")[0]
