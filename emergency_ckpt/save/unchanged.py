"""Saves whose bytes all equal those of the previous save: a run whose weights do not change."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Mapping, Sequence

from emergency_ckpt.events import EventSink
from emergency_ckpt.save.vote import CHANGED, Ballot


class UnchangedSaves:
    """Compares the checksums of each save of this process with those of its previous save.

    The leader, which has the ballots of all processes, emits the event ``save.unchanged``, and not
    again until after a save that differs. Used by one thread.
    """

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._before: tuple[int, bytes] | None = None
        self._is_told = False

    def restart(self) -> None:
        """After a restore: compare the next save with no other save."""
        self._before, self._is_told = None, False

    def compare(self, step: int, layout: bytes, crcs: Sequence[int]) -> int:
        """Return the step of the previous save if all shards of ``step`` equal its shards.

        ``CHANGED`` for other bytes or another layout, without a previous save, and where that save
        is of the same step. ``crcs``: the CRC32C of each shard, in the order of the layout.
        """
        digest = hashlib.sha256(layout + array.array("L", crcs).tobytes()).digest()
        before, self._before = self._before, (step, digest)
        if before is None or before[0] == step or before[1] != digest:
            return CHANGED
        return before[0]

    def note(self, step: int, ballots: Mapping[int, Ballot]) -> None:
        """At the leader, with all ballots of a complete save: report if no byte has changed."""
        before = self.since(ballots)
        if before != CHANGED and not self._is_told:
            text = (
                f"all bytes of step {step} equal those of step {before}: does the training change"
                " the state that it gives to save?"
            )
            self._events.emit("save.unchanged", step=step, before=before, text=text)
        self._is_told = before != CHANGED

    @staticmethod
    def since(ballots: Mapping[int, Ballot]) -> int:
        """Return the step since which all processes are unchanged, or ``CHANGED``."""
        steps = {ballot.unchanged_since for ballot in ballots.values()}
        return steps.pop() if len(steps) == 1 else CHANGED
