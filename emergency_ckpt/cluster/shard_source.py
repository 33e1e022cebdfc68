"""The holdings that this process serves to its peers, and the host states that peers send to it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from emergency_ckpt._native import Mapping
from emergency_ckpt.cluster.loaded_part import LoadedPart
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.state import host_state
from emergency_ckpt.types import Contents, SaveId

_INBOX_SAVES = 4
"""Documents of so many saves stay: a process sends its own after the previous save's end there."""
_CHECK_INTERVAL_S = 1.0


def holder_name(process_index: int) -> str:
    return f"process/{process_index}"


class HostStateInbox:
    """Host states that peers sent for saves to storage; those of the newest saves stay.

    They are in memory outside of the ramdisk, since a full ramdisk must not stop a save to storage.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_save: OrderedDict[SaveId, dict[int, bytes]] = OrderedDict()

    def put(self, save: SaveId, owner: int, data: bytes) -> None:
        """Keep a received document; drop the documents of the saves that came first."""
        with self._changed:
            self._by_save.setdefault(save, {})[owner] = data
            while len(self._by_save) > _INBOX_SAVES:
                self._by_save.popitem(last=False)
            self._changed.notify_all()

    def wait_for(
        self,
        save: SaveId,
        owners: Collection[int],
        timeout_s: float,
        check: Callable[[Collection[int]], None] = lambda _: None,
    ) -> dict[int, bytes]:
        """Return the documents of ``owners``; DeadlineExceeded names the missing owners.

        ``check`` is called about every second with the missing owners. An error of ``check`` ends
        the wait, unless a missing document arrived meanwhile: its process may have left right after
        it sent the document.
        """
        deadline_s = time.monotonic() + timeout_s

        def missing() -> list[int]:
            return [owner for owner in owners if owner not in self._by_save.get(save, {})]

        while True:
            with self._changed:
                left_s = max(deadline_s - time.monotonic(), 0)
                if self._changed.wait_for(lambda: not missing(), min(left_s, _CHECK_INTERVAL_S)):
                    documents = self._by_save.get(save, {})
                    return {owner: documents[owner] for owner in owners}
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(
                        "wait for host states of",
                        f"step {save.step}",
                        f"not all came within {timeout_s:g} s",
                        missing=[f"process {owner}" for owner in missing()],
                    )
            lacking = missing()
            try:
                check(lacking)
            except Exception:
                if missing() == lacking:
                    raise


class ProcessHoldings:
    """The local tier of this process, as ``transfer.source.Holdings``.

    Attributes:
      name: of this process as a holder.
      loaded: the part that the restore under way has read from storage; None without such a part.
    """

    def __init__(self, tier: LocalTier, process_index: int) -> None:
        self._tier = tier
        self._process_index = process_index
        self.name = holder_name(process_index)
        self.address = ""
        self.inbox = HostStateInbox()
        self.loaded: LoadedPart | None = None

    def end_loaded(self) -> None:
        """Serve the part that a restore has read from storage no more; a published slot stays."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.end()

    def _loaded(self, digest: str) -> LoadedPart | None:
        loaded = self.loaded
        return None if loaded is None or loaded.digest != digest else loaded

    def inventory(self) -> HolderInventory:
        inventory = self._tier.inventory(self.name, self._process_index, self.address)
        return inventory if self.loaded is None else self.loaded.added_to(inventory)

    def contents(self, digest: str) -> Contents | None:
        """Return the contents with a digest, or None when this process does not have them."""
        loaded = self._loaded(digest)
        return self._tier.contents(digest) if loaded is None else loaded.contents

    def contents_bytes(self, digest: str) -> bytes | None:
        loaded = self._loaded(digest)
        return self._tier.contents_bytes(digest) if loaded is None else loaded.encoded

    def mapping_for(self, digest: str) -> AbstractContextManager[tuple[Mapping, Contents]]:
        loaded = self._loaded(digest)
        return self._tier.mapping_for(digest) if loaded is None else loaded.reading()

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        loaded = self.loaded
        data = None if loaded is None else loaded.document(save, owner, count)
        return self._tier.host_state_bytes(save, owner, count) if data is None else data

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        self._tier.publish_host_state(save, owner, count, data)

    def hold_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Keep a host state that a peer sent for a save to storage, outside of the ramdisk."""
        host_state.decode_of(save, owner, count, data)
        self.inbox.put(save, owner, data)
