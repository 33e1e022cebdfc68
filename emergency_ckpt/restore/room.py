"""Room for what a restore writes: what it may still need is given up last.

Where the ramdisk has none, memory of the process takes it, until the next save begins: the step
then goes to the devices, and is not in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from absl import logging

from emergency_ckpt.errors import LocalTierError, RamdiskFull, SlotBusy
from emergency_ckpt.ram.tier import LocalTier, SlotWriter
from emergency_ckpt.types import SaveId

_T = TypeVar("_T")


class RestoreRoom:
    """The room of one process for what one restore brings.

    Room that is free goes first, then what is of ``expendable``, then of other saves but
    ``sources``, the oldest first: an older step is second choice. Then memory is used.

    Args of its methods:
      expendable: saves of which nothing here is needed: passed over by the plan, or about to be
        read anew.
      sources: what is written is copied from these.

    Attributes:
      lack: why something is in memory instead of the ramdisk; empty while nothing is.
    """

    def __init__(self, tier: LocalTier) -> None:
        self._tier = tier
        self.lack = ""

    def note_full(self, reason: str) -> None:
        """Use memory alone from now on: the ramdisk became full while it was written."""
        if not self.lack:
            logging.warning("what is restored goes into memory, not into the ramdisk: %s", reason)
        self.lack = self.lack or reason

    def begin_write(
        self,
        save: SaveId,
        size_bytes: int,
        *,
        expendable: Collection[SaveId],
        sources: Collection[SaveId] = (),
        sparse: bool = False,
    ) -> SlotWriter:
        """Return the writer of a slot for ``save``; ``sparse`` as in ``LocalTier.begin_write``."""
        tier = self._tier
        return self._find(
            expendable,
            sources,
            lambda: tier.begin_write(save, size_bytes, allow_extra=True, sparse=sparse),
            lambda: tier.begin_write_in_memory(save, size_bytes),
        )

    def publish_host_state(
        self,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        expendable: Collection[SaveId] = (),
    ) -> None:
        """Publish a document of ``save``, whose tensors here stay."""
        publish = self._tier.publish_host_state
        self._find(
            expendable,
            [save],
            lambda: publish(save, owner, count, data, restores=True),
            lambda: publish(save, owner, count, data, in_memory=True),
        )

    def _find(
        self,
        expendable: Collection[SaveId],
        sources: Collection[SaveId],
        in_ramdisk: Callable[[], _T],
        in_memory: Callable[[], _T],
    ) -> _T:
        if self.lack:
            return in_memory()
        held = {each.save for each in self._tier.held()[0]}
        failure: LocalTierError | None = None
        for protected in (held, held.difference(expendable), held.intersection(sources)):
            self._tier.protect(protected)
            try:
                return in_ramdisk()
            except (RamdiskFull, SlotBusy) as error:
                failure = error
        self.note_full(str(failure))
        return in_memory()
