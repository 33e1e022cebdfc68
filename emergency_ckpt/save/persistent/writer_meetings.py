"""Barriers of the writers of one persistent save."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from emergency_ckpt.cluster.coordination import deadline_left_s
from emergency_ckpt.cluster.messages import reason_of
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.save.persistent.keys import PersistentSaveKeys
from emergency_ckpt.tiers.persistent.meetings import MEETINGS, WRITTEN
from emergency_ckpt.types import SaveId


class WriterMeetings:
    """Barriers at which the writers of one save wait for each other. Thread-safe.

    One that has failed tells those who still wait for it: they must not run into their deadline.
    """

    def __init__(
        self,
        keys: PersistentSaveKeys,
        save: SaveId,
        members: Sequence[int],
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """``before_commit``: for the first writer, called when all have written; may raise."""
        self._before_commit = before_commit
        self._keys = keys
        self._save = save
        self._has_others = len(members) > 1
        self._ahead: deque[str] = deque(MEETINGS)

    def meet(self, name: str, others: Sequence[int], deadline_s: float) -> None:
        """As ``orbax_writing.Meet``; PersistentTierError when one of the ``others`` has failed."""
        step = f"step {self._save.step}"
        try:
            self._ahead.remove(name)
        except ValueError:
            raise PersistentTierError("save", step, "this process has given it up") from None
        if self._has_others:
            self._keys.put(self._save, name, b"")
        for writer in others:
            reason = self._keys.get(self._save, name, writer, deadline_left_s(deadline_s))
            if reason:
                problem = f"process {writer} failed: {reason_of(reason)}"
                raise PersistentTierError("save", step, problem)
        if name == WRITTEN and self._before_commit is not None:
            self._before_commit()

    def leave(self, reason: str) -> None:
        """Tell all who still come that this process has failed, and come to no more meetings."""
        with contextlib.suppress(IndexError):
            while True:
                name = self._ahead.popleft()
                if self._has_others:
                    self._keys.put(self._save, name, reason.encode())
