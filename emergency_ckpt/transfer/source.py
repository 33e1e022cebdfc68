"""The types that the transfer server serves and the client asks for, without the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.types import Contents, SaveId


class ShardTarget(msgspec.Struct, frozen=True):
    """A shard to fetch, and its place in the target.

    Attributes:
      shard: index into the ``shards`` of the contents that the fetch names.
      nbytes: length of the whole shard in bytes.
      offset: position in bytes of its first byte in the target.
    """

    shard: int
    nbytes: int
    offset: int


class FileTarget(msgspec.Struct, frozen=True):
    """An open file to fetch into, which may have holes; the caller owns and closes ``fd``.

    It costs less than a mapping when the file's pages do not exist yet.
    """

    fd: int
    size_bytes: int


class PartlyMade(msgspec.Struct, frozen=True):
    """A file to fetch into whose pages exist up to some place: mapped up to there, holes after it.

    ``made``: a mapping of the file's beginning.
    """

    made: Mapping
    file: FileTarget

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes

    def of(self, ranges: Sequence[tuple[int, int]]) -> Mapping | FileTarget:
        """Return what receives the (offset, nbytes) ranges: the mapping where it has all."""
        end = max((offset + nbytes for offset, nbytes in ranges), default=0)
        return self.made if end <= self.made.size_bytes else self.file


Target = Mapping | FileTarget | PartlyMade
"""A writable mapping, or a file, or both, that receives the fetched bytes."""


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
        """Lend the bytes and their layout. The slot is not written meanwhile; NotHeld when gone."""
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
