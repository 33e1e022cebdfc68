"""The choice of the one server, among those of a job's hosts, that drains its RAM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Turn = Literal["drain", "wait", "leave"]

CANDIDATES = 2
"""The second one is there for the case that the first one dies. More would only repeat the look at
storage, one after the other, while their hosts are to be given back."""


def candidates_of(own: str, answering: Collection[str]) -> tuple[str, ...]:
    """Return the addresses whose servers may drain, in their order, of all that answer now."""
    return tuple(sorted({own, *answering})[:CANDIDATES])


def turn_at_the_end(own: str, candidates: tuple[str, ...], answering: Collection[str]) -> Turn:
    """Return what a server does whose host is about to be given back.

    All go on serving until the candidates have left: those need what the others have.

    Args:
      candidates: as of when the end began; the same on all hosts that began it together.
      answering: those of ``candidates`` that answer now.
    """
    if own not in candidates:
        return "wait" if answering else "leave"
    before = candidates[: candidates.index(own)]
    return "wait" if any(each in answering for each in before) else "drain"
