"""The memory of a restore from storage on one process: the part it has read, and room for the rest.

Peers fetch the part that this process has read from this memory, into which the process receives
the rest meanwhile. The memory is a free slot, or plain memory where the ramdisk has no room. A slot
is published once it has all that stays in RAM, so a restore that fails leaves nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt import _native
from emergency_ckpt.background import copy_threads, new_memory
from emergency_ckpt.core.restore.inventory import HeldTensors, HolderInventory
from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import LocalTierError, NotHeld
from emergency_ckpt.ram.manifest import contents_digest, encode_contents
from emergency_ckpt.ram.process_files import held_host_state
from emergency_ckpt.ram.slot_writer import SlotWriter
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.mapped import MappedMemory
from emergency_ckpt.state.pins import Pin
from emergency_ckpt.types import Contents, SaveId


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
