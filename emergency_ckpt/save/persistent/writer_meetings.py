"""The points at which the writers of one persistent save wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.save.persistent.keys import TENSORS, PersistentSaveKeys, rule_of
from emergency_ckpt.save.persistent.reports import StageReport, raise_failure, report_of
from emergency_ckpt.storage.meetings import BEGUN
from emergency_ckpt.types import SaveId


class WriterMeetings:
    """One round: the first writer's answer begins it, and what the others say ends it.

    The first tells when it has made the folders, and goes on when all have said that they have
    written. One that has failed says so: the others must not run into their deadline.
    """

    def __init__(
        self,
        keys: PersistentSaveKeys,
        save: SaveId,
        writers: Sequence[int],
        *,
        is_first: bool,
        before_commit: Callable[[], None],
    ) -> None:
        """``before_commit``: called at the first writer when all have written; may raise."""
        self._save = save
        self._first = writers[0]
        self._is_first = is_first
        self._before_commit = before_commit
        self._round = keys.stage(save, TENSORS, writers)
        self._has_said = False
        self._is_over = False

    def meet(self, name: str) -> None:
        """As ``meetings.Meet``; PersistentTierError when another has failed."""
        if self._is_over:
            step = f"step {self._save.step}"
            raise PersistentTierError("save", step, "this process has given it up")
        if name != BEGUN:
            self._say("")
            if self._is_first:
                rule = rule_of(self._round, TENSORS, self._save.step, self._first)
                self._check(self._round.hear(rule))
                self._before_commit()
        elif self._is_first:
            self._round.tell(msgspec.json.encode(StageReport()))
        else:
            self._check(self._round.learn())

    def leave(self, reason: str) -> None:
        """Tell the others that this process has failed, and come to no more meetings."""
        self._is_over = True
        if self._is_first:
            self._round.fail(PersistentTierError("save", f"step {self._save.step}", reason))
        self._say(reason)

    def _say(self, error: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._round.say(msgspec.json.encode(StageReport(error)))

    def _check(self, answer: object) -> None:
        assert isinstance(answer, bytes)
        raise_failure(report_of(answer, TENSORS, self._save.step, self._first), self._save.step)
