"""What a transfer server serves and a client asks for, apart from how it travels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.types import Contents, SaveId


class ShardTarget(msgspec.Struct, frozen=True):
    """A shard to fetch and where it goes.

    Attributes:
      shard: index into the ``shards`` of the contents that the fetch names.
      nbytes: length of the whole shard in bytes.
      offset: first byte in the target mapping.
    """

    shard: int
    nbytes: int
    offset: int


class FileTarget(msgspec.Struct, frozen=True):
    """An open file to fetch into, which may have holes; ``fd`` stays the caller's.

    Cheaper than a mapping where the file's pages do not exist yet.
    """

    fd: int
    size_bytes: int


Target = Mapping | FileTarget
"""Where fetched bytes go: a writable mapping, or a file."""


class Holdings(Protocol):
    """What one holder has. Every method may be called from several threads at once.

    A method that cannot do what is asked raises a CheckpointError; its text goes to the peer.
    """

    def inventory(self) -> HolderInventory:
        """All that is published here now."""
        ...

    def contents_bytes(self, digest: str) -> bytes | None:
        """The canonical encoding whose SHA-256 is ``digest``; None when not held."""
        ...

    def mapping_for(self, digest: str) -> AbstractContextManager[tuple[Mapping, Contents]]:
        """The bytes and their layout. The slot is not written while inside; NotHeld when gone."""
        ...

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """The encoded host state of process ``owner`` of ``count``; None when not held."""
        ...

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Validate and keep a host state that a buddy pushed. HostStateError when it is not one."""
        ...
