"""Room in the ramdisk for a restore's writes: saves that it may still need are overwritten last.

Where the ramdisk has no room, the restore goes on without the ramdisk: the step goes to the devices
from plain memory, and is not kept in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from absl import logging

from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import HostStatesFull, LocalTierError, RamdiskFull, SlotBusy
from emergency_ckpt.ram.tier import LocalTier, SlotWriter
from emergency_ckpt.types import SaveId

_T = TypeVar("_T")


class RestoreRoom:
    """The room of one process for the shards and documents of one restore.

    Free room is used first, then that of ``expendable`` saves, then that of other saves except
    ``sources``, the oldest first: a restore may still fall back to an older step.

    Args of its methods:
      expendable: saves of which nothing here is needed: the plan passed over them, or they are
        about to be read anew.
      sources: saves from which the written bytes are copied.

    Attributes:
      lack: why something is not in the ramdisk; empty while there was room for all.
    """

    def __init__(self, tier: LocalTier, lack: str) -> None:
        """``lack``: why there is no room from the start; empty where there may be."""
        self._tier = tier
        self.lack = lack

    def note_full(self, reason: str) -> None:
        """Use the ramdisk no more: it has no room, or became full during a write."""
        if not self.lack:
            logging.warning("the ramdisk does not keep all of the restored step: %s", reason)
        self.lack = self.lack or reason

    def begin_write(
        self,
        save: SaveId,
        layout: Layout,
        *,
        expendable: Collection[SaveId],
        sources: Collection[SaveId] = (),
    ) -> SlotWriter | None:
        """Return the writer of a slot for ``layout``; None where there is no room."""
        size_bytes, places = layout.size_bytes, layout.places
        return self._in_room(
            expendable,
            sources,
            lambda: self._tier.begin_write(save, size_bytes, places=places, restores=True),
        )

    def publish_host_state(
        self,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        expendable: Collection[SaveId] = (),
    ) -> bool:
        """Publish a document of ``save``, whose tensors stay; return False if there is no room.

        Nothing makes way for a document where RAM has as many documents as it may have.
        """

        def publish() -> bool:
            self._tier.publish_host_state(save, owner, count, data, restores=True)
            return True

        try:
            return self._in_room(expendable, [save], publish) is not None
        except HostStatesFull as error:
            logging.warning("a restored host state is not kept: %s", error)
            return False

    def _in_room(
        self, expendable: Collection[SaveId], sources: Collection[SaveId], write: Callable[[], _T]
    ) -> _T | None:
        """Return the result of ``write``; None where there is no room, whatever makes way."""
        if self.lack:
            return None
        saves = {manifest.save for manifest in self._tier.held()[0]}
        failure: LocalTierError | None = None
        for protected in (saves, saves.difference(expendable), saves.intersection(sources)):
            self._tier.protect(protected)
            try:
                return write()
            except (RamdiskFull, SlotBusy) as error:
                failure = error
        self.note_full(str(failure))
        return None
