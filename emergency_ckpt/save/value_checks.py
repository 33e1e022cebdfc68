"""Reports on the values of saves: some are NaN or infinite, or none has changed since the last."""

from __future__ import annotations

import array
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from emergency_ckpt.core.save.save_rules import NonFinite
from emergency_ckpt.core.wording import few
from emergency_ckpt.events import EventSink
from emergency_ckpt.save.vote import CHANGED, Ballot
from emergency_ckpt.state.dtypes import NO_VALUES, ValuePattern, non_finite_pattern
from emergency_ckpt.types import LeafSpec, ShardId

_NAMED_LEAVES = 16


class FiniteLeaves:
    """The record of one process, in memory. Thread-safe: each tier's thread captures."""

    def __init__(self, events: EventSink, non_finite: NonFinite = "off") -> None:
        self.is_on = non_finite != "off"
        self._events = events
        self._lock = threading.Lock()
        self._finite: set[ShardId] = set()
        self._told: set[ShardId] = set()
        self._all_were_finite = False

    def patterns(
        self, shards: Sequence[ShardId], specs: Mapping[str, LeafSpec]
    ) -> list[ValuePattern]:
        """Return which values the copy of each shard counts: no values where the check is off."""
        if not self.is_on:
            return [NO_VALUES] * len(shards)
        return [non_finite_pattern(specs[shard.leaf].dtype) for shard in shards]

    def note(self, step: int, counts: Mapping[ShardId, int]) -> None:
        """Note how many values of each captured shard are not finite.

        Emits ``save.non_finite`` once for the shards that were finite before: at an earlier save of
        this process, or in the step that it restored. Other shards may be meant to have them.
        """
        if not self.is_on:
            return
        with self._lock:
            lost = [
                shard
                for shard, count in counts.items()
                if count and (self._all_were_finite or shard in self._finite)
            ]
            new = [shard for shard in lost if shard not in self._told]
            finite = {shard for shard, count in counts.items() if not count}
            self._finite |= finite
            self._told = (self._told - finite) | set(lost)
        if not new:
            return
        by_leaf: Counter[str] = Counter()
        for shard in new:
            by_leaf[shard.leaf] += counts[shard]
        named = few((f"{path}: {count}" for path, count in sorted(by_leaf.items())), _NAMED_LEAVES)
        text = f"values of step {step} are NaN or infinite in leaves that were finite: {named}"
        self._events.emit(
            "save.non_finite", step=step, leaves=len(by_leaf), values=by_leaf.total(), text=text
        )

    def note_restored(self, *, is_finite: bool) -> None:
        """Report anew from here on. ``is_finite``: all values of the restored step are finite."""
        with self._lock:
            self._told.clear()
            self._all_were_finite = self._all_were_finite or is_finite


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
