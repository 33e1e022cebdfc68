"""The types that the transfer server serves and the client asks for, without the protocol."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.types import Contents, SaveId


class ShardTarget(msgspec.Struct, frozen=True):
    """A shard to fetch, and its place in the memory that receives it.

    Attributes:
      shard: index into the ``shards`` of the contents that the fetch names.
      nbytes: length of the whole shard in bytes.
      offset: position in bytes of its first byte in the memory that receives it.
    """

    shard: int
    nbytes: int
    offset: int


class Holdings(Protocol):
    """The published steps and host states of one holder. Thread-safe.

    A method that fails raises a CheckpointError, whose text is sent to the peer.
    """

    def inventory(self) -> HolderInventory:
        """Return all that is published now."""
        ...

    def contents_bytes(self, digest: str) -> bytes | None:
        """Return the canonical encoding whose SHA-256 is ``digest``, or None when not held."""
        ...

    def mapping_for(self, digest: str) -> AbstractContextManager[tuple[Mapping, Contents]]:
        """Give the bytes and their layout. The slot is not written meanwhile; NotHeld when gone."""
        ...

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return the encoded host state of process ``owner`` of ``count``, or None."""
        ...

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Check and publish a host state that a peer pushed. HostStateError when it is invalid."""
        ...

    def hold_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Check a host state that a peer pushed for storage, and hold it in memory. As above."""
        ...
