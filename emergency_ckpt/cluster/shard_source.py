"""The holdings that this process serves to its peers, and the host states that peers send to it.

In a restore from storage these include the part that this process has read (``LoadedPart``). Peers
fetch that part from the memory into which the process receives the rest meanwhile. The memory is a
free slot, or plain memory where the ramdisk has no room. A slot is published once it has all that
stays in RAM, so a restore that fails leaves nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt import _native
from emergency_ckpt.background import copy_threads, new_memory
from emergency_ckpt.core.restore.inventory import HeldTensors, HolderInventory
from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import DeadlineExceeded, LocalTierError, NotHeld
from emergency_ckpt.ram.manifest import contents_digest, encode_contents
from emergency_ckpt.ram.process_files import held_host_state
from emergency_ckpt.ram.slot_writer import SlotWriter
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.mapped import MappedMemory, Pin
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
      name: of this process as a holder, by its ``process_index``.
      loaded: the part that the restore under way has read from storage; None without such a part.
    """

    def __init__(self, tier: LocalTier, process_index: int) -> None:
        self._tier = tier
        self.process_index = process_index
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
        inventory = self._tier.inventory(self.name, self.process_index, self.address)
        loaded = self.loaded  # the end of a restore may set None meanwhile
        return inventory if loaded is None else loaded.added_to(inventory)

    def contents(self, digest: str) -> Contents | None:
        """Return the contents with a digest, or None when this process does not have them."""
        loaded = self._loaded(digest)
        return self._tier.contents(digest) if loaded is None else loaded.contents

    def contents_bytes(self, digest: str) -> bytes | None:
        loaded = self._loaded(digest)
        return self._tier.contents_bytes(digest) if loaded is None else loaded.encoded

    def mapping_for(self, digest: str) -> AbstractContextManager[tuple[_native.Mapping, Contents]]:
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
        host_states.decode_of(save, owner, count, data)
        self.inbox.put(save, owner, data)


class Scratch:
    """Plain memory of this process, as a mapping to receive into. Freed with its last view.

    Raises:
      LocalTierError: the system gives no memory.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = max(1, size_bytes)
        try:
            self.mapping = new_memory("eckpt-fetched", size_bytes)
        except OSError as error:
            raise LocalTierError("make", f"{size_bytes} bytes of memory", str(error)) from error

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy; it keeps the memory alive."""
        return self.mapping.view(offset, nbytes, None)


class LoadedPart:
    """The part of a step in storage that this process has read; see the module.

    Attributes:
      contents: the shards that were read, with their places in ``memory``.
      digest: the name of ``contents`` for peers.
      memory: written only where ``contents`` has no shard.
      layout: the places of the shards that were read, and of the shards to come.
      is_open: the part is not published, and more may be written.
      published: digest of the slot with all shards that stay in RAM, once that is published.
    """

    def __init__(
        self,
        contents: Contents,
        memory: SlotWriter | Scratch,
        layout: Layout,
        documents: Mapping[int, bytes],
    ) -> None:
        """``documents``: by owner, the host states for which the ramdisk has no room."""
        self.contents = contents
        self.encoded = encode_contents(contents)
        self.digest = contents_digest(self.encoded)
        self.memory = memory
        self.layout = layout
        self.is_open = True
        self.published: str | None = None
        self._mapping = memory.mapping
        self._documents = {
            held_host_state(host_states.decode(data), len(data)): data
            for data in documents.values()
        }
        self._pin: Pin | None = None
        self._mapped: MappedMemory | None = None
        if isinstance(memory, SlotWriter):
            self._pin, self._mapped = memory.pin(), memory.mapped
        self._is_served = True

    def added_to(self, inventory: HolderInventory) -> HolderInventory:
        """Return the inventory of this process with this part.

        Process 0 also names a part without shards, so that some process names a state of no bytes.
        """
        tensors = inventory.tensors
        if self.contents.shards or inventory.process_index == 0:
            tensors = tuple(sorted({*tensors, HeldTensors(self.contents.save, self.digest)}))
        documents = tuple(sorted({*inventory.host_states, *self._documents}))
        return msgspec.structs.replace(inventory, tensors=tensors, host_states=documents)

    def document(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return an encoded host state; None when it is not here."""
        for host_state, data in self._documents.items():
            if (host_state.save, host_state.owner, host_state.count) == (save, owner, count):
                return data
        return None

    def verify(self, shards: Sequence[int]) -> list[tuple[int, int]]:
        """Return (shard, actual CRC32C) of each of ``shards`` that is damaged in memory."""
        entries = [self.contents.shards[shard] for shard in shards]
        ranges = [(entry.offset, entry.nbytes) for entry in entries]
        crcs = _native.crc32c_ranges(self._mapping, ranges, copy_threads())
        return [
            (shard, crc)
            for shard, entry, crc in zip(shards, entries, crcs, strict=True)
            if crc != entry.crc32c
        ]

    def view(self, shard: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a shard that was read, without a copy."""
        entry = self.contents.shards[shard]
        return self.memory.view(entry.offset, entry.nbytes)

    def transfer(self) -> AbstractContextManager[object]:
        """While inside, keep memory that is mapped for the devices' DMA mapped."""
        return nullcontext() if self._mapped is None else self._mapped.transfer()

    @contextmanager
    def reading(self) -> Generator[tuple[_native.Mapping, Contents]]:
        """Give a peer the memory to read; no other save is written there meanwhile. NotHeld."""
        pin = self._pin
        if not self._is_served:
            raise NotHeld("read", f"manifest {self.digest[:12]}", "its restore is over")
        yield self._mapping, self.contents
        del pin

    def end(self) -> None:
        """Serve the part no more; an unpublished slot is free once no peer reads from it."""
        self._is_served = self.is_open = False
        if isinstance(self.memory, SlotWriter):
            self.memory.abort()
        self._pin = None
