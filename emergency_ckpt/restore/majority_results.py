"""The leader's view of replicas that differ: who is asked, what is told of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.majority import Divergence, MajorityResult, settle
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import SaveId, ShardId

MOST_NAMED = 16
"""So many shards are named, each by a line of its own; of the others only the number is told."""

WITNESS_TIMEOUT_S = 30.0
"""Longest wait for storage's checksums, which a restore from RAM does not need otherwise."""


class MajorityResults:
    """Settles the replicas of one restore's saves, and tells of each that differs once.

    Where the holders of a shard have no majority and storage holds the same save, its checksums of
    capture time are one more vote: what lies in storage was written from the same snapshot, by
    whoever may write there. They are read for nothing else, so a job whose replicas agree never
    waits for them.
    """

    def __init__(
        self, persistent: PersistentTier | None, events: EventSink, deadline_s: float
    ) -> None:
        self._persistent = persistent
        self._events = events
        self._deadline_s = deadline_s
        self._witnesses: dict[SaveId, Mapping[ShardId, int]] = {}
        self._told: set[Divergence] = set()

    def settle(self, inventory: Inventory, save: SaveId) -> MajorityResult:
        """Return what a majority decides of ``save``. Reads storage where holders have none."""
        majority_result = settle(inventory, save, self._witnesses.get(save, {}))
        if majority_result.undecided and save not in self._witnesses:
            self._witnesses[save] = self._witness(inventory, save)
            majority_result = settle(inventory, save, self._witnesses[save])
        self._tell(save, majority_result)
        return majority_result

    def lines(self, majority_result: MajorityResult) -> tuple[str, ...]:
        """Name the shards without a majority: step, leaf, box and holders of each."""
        named = [each.describe() for each in majority_result.undecided[:MOST_NAMED]]
        return (*named, *_and_more(len(majority_result.undecided)))

    def _witness(self, inventory: Inventory, save: SaveId) -> Mapping[ShardId, int]:
        """Storage's CRC32C of each shard of the same save; nothing where that cannot be read."""
        is_stored = any(
            (item.step, item.incarnation, item.problem) == (save.step, save.incarnation, "")
            for item in inventory.persistent
        )
        if self._persistent is None or not is_stored:
            return {}
        now_s = time.monotonic()
        deadline_s = now_s + min(WITNESS_TIMEOUT_S, (self._deadline_s - now_s) / 8)
        try:
            found = self._persistent.find(save.step, deadline_s)
            stored = self._persistent.describe(found, deadline_s)
        except CheckpointError as error:
            self._events.emit(
                "restore.note",
                text=f"storage cannot say which replicas of step {save.step} are right: {error}"[
                    :500
                ],
            )
            return {}
        is_same = stored.marker is not None and stored.marker.save == save
        return stored.crcs if is_same else {}

    def _tell(self, save: SaveId, majority_result: MajorityResult) -> None:
        """Emit ``divergence`` for each shard that no event has named."""
        lines = [
            (each.divergence, each.describe())
            for each in majority_result.decided
            if each.divergence not in self._told
        ]
        lines += [
            (each, f"{each.describe()}; no majority") for each in majority_result.undecided
            if each not in self._told
        ]  # fmt: skip
        self._told.update(each for each, _ in lines)
        for text in (*(text for _, text in lines[:MOST_NAMED]), *_and_more(len(lines))):
            self._events.emit("divergence", step=save.step, text=text)


def _and_more(count: int) -> list[str]:
    return [f"copies of {count - MOST_NAMED} more shards differ"] if count > MOST_NAMED else []
