"""Which leaves of the state were finite on this process, and the event when a leaf no longer is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from emergency_ckpt.core.save.retention_rules import NonFinite
from emergency_ckpt.core.wording import few
from emergency_ckpt.events import EventSink
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
