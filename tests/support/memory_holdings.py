"""Holdings in anonymous memory: a peer for tests, without a ramdisk or a trainer."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import msgspec

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
from emergency_ckpt.errors import HostStateError, NotHeld
from emergency_ckpt.types import (
    SHARD_ALIGNMENT_BYTES,
    Contents,
    LeafSpec,
    SaveId,
    ShardEntry,
)


def anonymous_mapping(size_bytes: int) -> Mapping:
    """Return a writable anonymous mapping of ``size_bytes`` zero bytes, at least one page."""
    descriptor = os.memfd_create("emergency_ckpt", os.MFD_CLOEXEC)
    try:
        size_bytes = max(size_bytes, 4096)
        os.posix_fallocate(descriptor, 0, size_bytes)
        return Mapping(descriptor, size_bytes, writable=True)
    finally:
        os.close(descriptor)


class MemoryHoldings:
    """Implements ``transfer.source.Holdings``. Thread-safe.

    A host state is kept unless it is empty or ``b"refuse"``, which shows that a server reports the
    refusal.
    """

    def __init__(self, address: str = "memory:1") -> None:
        self.address = address
        self._lock = threading.Lock()
        self._held: dict[str, tuple[Mapping, Contents, bytes]] = {}
        self._host_states: dict[tuple[SaveId, int, int], bytes] = {}

    def add(self, save: SaveId, shards: Sequence[bytes]) -> str:
        """Add contents with one uint8 leaf ``shard/00000``... per shard. Return the digest."""
        leaves: list[LeafSpec] = []
        entries: list[ShardEntry] = []
        copies: list[tuple[bytes, int]] = []
        end = 0
        for index, data in enumerate(shards):
            offset = -(-end // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
            end = offset + len(data)
            leaves.append(LeafSpec(f"shard/{index:05}", "uint8", (len(data),)))
            box = ((0, len(data)),)
            entries.append(ShardEntry(index, box, offset, len(data), _native.crc32c(data)))
            copies.append((data, offset))
        mapping = anonymous_mapping(end)
        _native.copy_crc32c(mapping, copies, 1)
        contents = Contents(save=save, leaves=tuple(leaves), shards=tuple(entries))
        encoded = msgspec.json.encode(contents, order="sorted")
        digest = hashlib.sha256(encoded).hexdigest()
        with self._lock:
            self._held[digest] = (mapping, contents, encoded)
        return digest

    def corrupt(self, digest: str, shard: int) -> None:
        """Flip one bit of the first byte of a shard and keep its CRC."""
        mapping, contents, _ = self._held[digest]
        offset = contents.shards[shard].offset
        flipped = bytes([int(mapping.view(offset, 1, self)[0]) ^ 1])
        _native.copy_crc32c(mapping, [(flipped, offset)], 1)

    def forget(self, digest: str) -> None:
        """Remove contents, as if their slot was reused."""
        with self._lock:
            del self._held[digest]

    def inventory(self) -> HolderInventory:
        with self._lock:
            tensors = tuple(
                sorted(
                    HeldTensors(contents.save, digest)
                    for digest, (_, contents, _) in self._held.items()
                )
            )
            states = tuple(
                HeldHostState(
                    save, owner, count, hashlib.sha256(data).hexdigest(), len(data), False
                )
                for (save, owner, count), data in sorted(self._host_states.items())
            )
        return HolderInventory(
            holder=f"server/{self.address}",
            process_index=None,
            address=self.address,
            tensors=tensors,
            host_states=states,
        )

    def contents_bytes(self, digest: str) -> bytes | None:
        with self._lock:
            held = self._held.get(digest)
        return None if held is None else held[2]

    @contextmanager
    def mapping_for(self, digest: str) -> Generator[tuple[Mapping, Contents]]:
        with self._lock:
            held = self._held.get(digest)
        if held is None:
            raise NotHeld("read", f"contents {digest}", "not held here")
        yield held[0], held[1]

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        with self._lock:
            return self._host_states.get((save, owner, count))

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        if not data or data == b"refuse":
            raise HostStateError("publish", f"host state {owner} of {count}", "not a document")
        with self._lock:
            self._host_states[save, owner, count] = data

    def hold_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        self.publish_host_state(save, owner, count, data)
