"""The documents of a persistent step: its checksums and its host states. Without Orbax."""

from __future__ import annotations

import hashlib

from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, MAX_MARKER_BYTES
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state.host_state import document_name
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.marker import (
    CHECKSUMS_NAME,
    HOST_STATE,
    StepMarker,
    decode_checksums,
)
from emergency_ckpt.types import ShardId


def read_checksums(
    storage: StorageDirectory,
    documents: str,
    marker: StepMarker,
    deadline_s: float | None = None,
) -> dict[ShardId, int]:
    """Return the CRC32C of each box at capture time, checked against ``marker``. Blocks.

    ``documents``: the step's folder below ``host_state``. CorruptData, PersistentTierError.
    """
    below = f"{HOST_STATE}/{documents}/{CHECKSUMS_NAME}"
    path = storage.path / below
    data = storage.read_bounded(path, f"/{below}", MAX_MARKER_BYTES, deadline_s)
    return decode_checksums(data, marker, str(path))


def read_host_state(
    storage: StorageDirectory,
    documents: str,
    owner: int,
    count: int,
    digest: str,
    deadline_s: float | None = None,
) -> bytes:
    """Return a process's host-state document, checked against the marker's ``digest``. Blocks.

    CorruptData, PersistentTierError.
    """
    below = f"{HOST_STATE}/{documents}/{document_name(owner, count)}"
    path = storage.path / below
    data = storage.read_bounded(path, f"/{below}", MAX_HOST_STATE_BYTES, deadline_s)
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise CorruptData("read", str(path), "the digest differs", expected=digest, actual=actual)
    return data
