"""Plan of a snapshot: the copies on the devices, their memory, and the order of transfers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

DeviceReads = Literal["auto", "pinned_host", "pageable"]


@dataclass(frozen=True)
class Buffers:
    """Host memory through which the bytes of this process pass.

    Attributes:
      staging_bytes: most bytes of a save that are in flight from the devices, besides the memory
        that keeps the step. A larger shard moves in pieces.
      copy_batch_bytes: of one native call that copies.
      storage_bytes: in transfer to or from the persistent directory at once; a larger array is
        transferred alone.
    """

    staging_bytes: int = 256 << 20
    copy_batch_bytes: int = 1 << 30
    storage_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """One shard in device memory."""

    leaf: int
    device: int
    nbytes: int


@dataclass(frozen=True)
class DeviceCopyPlan:
    """The leaves that are copied on their devices.

    Attributes:
      leaves: all shards of these leaves are copied; for the others the training thread waits.
      device_bytes: bytes of the copies, by device.
    """

    leaves: frozenset[int]
    device_bytes: Mapping[int, int]


def plan_device_copies(pieces: Iterable[Piece], limit_bytes: int) -> DeviceCopyPlan:
    """Return the leaves to copy on the devices with at most ``limit_bytes`` on each.

    A leaf is copied on all its devices or on none. Leaves are taken largest first while they fit.
    On one device this copies at least half of the bytes of the best choice.
    """
    by_leaf: dict[int, dict[int, int]] = {}
    for piece in pieces:
        needs = by_leaf.setdefault(piece.leaf, {})
        needs[piece.device] = needs.get(piece.device, 0) + piece.nbytes
    used: dict[int, int] = {}
    chosen: set[int] = set()
    for leaf in sorted(by_leaf, key=lambda leaf: (-sum(by_leaf[leaf].values()), leaf)):
        needs = by_leaf[leaf]
        if all(used.get(device, 0) + nbytes <= limit_bytes for device, nbytes in needs.items()):
            chosen.add(leaf)
            for device, nbytes in needs.items():
                used[device] = used.get(device, 0) + nbytes
    return DeviceCopyPlan(frozenset(chosen), used)


def choose_sources(candidates: Sequence[Sequence[int]], nbytes: Sequence[int]) -> tuple[int, ...]:
    """Return the device that sends each shard, of those that hold it.

    Each device has its own link to the host. Shards with the fewest devices choose first, larger
    before smaller; each takes the device with the fewest bytes to send.
    """
    load: dict[int, int] = {}
    chosen = [0] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda i: (len(candidates[i]), -nbytes[i], i))
    for index in order:
        device = min(candidates[index], key=lambda device: (load.get(device, 0), device))
        load[device] = load.get(device, 0) + nbytes[index]
        chosen[index] = device
    return tuple(chosen)


def transfer_order(pieces: Sequence[Piece], copied: Collection[int]) -> tuple[int, ...]:
    """Return the indices of ``pieces`` in the order in which their transfers start.

    Pieces that the training thread waits for come first, then those in copies (``copied``: leaves).
    In each group the devices alternate by the bytes that each has sent, so that all links are in
    use.
    """
    order: list[int] = []
    for of_copies in (False, True):
        group = [i for i, piece in enumerate(pieces) if (piece.leaf in copied) is of_copies]
        sent: dict[int, int] = {}
        rank: dict[int, int] = {}
        for index in group:
            piece = pieces[index]
            rank[index] = sent.get(piece.device, 0)
            sent[piece.device] = rank[index] + piece.nbytes
        order += sorted(group, key=lambda i: (rank[i], pieces[i].device, i))
    return tuple(order)


_WHOLE_POOL = 0.99
"""Part of its limit that a pool has taken from the device where it was taken at the start."""


class Free(NamedTuple):
    """Bytes of one device that nothing has used, and why copies may take no more than half."""

    unused_bytes: int
    reason: str

    @property
    def nbytes(self) -> int:
        """Return the bytes that copies may take."""
        return self.unused_bytes // 2


def free_for_copies(platform: str, stats: Mapping[str, int]) -> Free:
    """Return what is certain to stay free, by JAX's ``memory_stats`` of one device.

    A training step that finds no memory has lost its donated state, so all that is doubtful counts
    as taken. Free is the limit less the peaks since the start, and no more than the largest free
    block. On a GPU only where the pool took its memory at the start: else others may have it.
    """
    limit_bytes = stats.get("bytes_limit", 0)
    if limit_bytes <= 0 or "peak_bytes_in_use" not in stats:
        return Free(0, f"{platform} devices do not say how much memory they have")
    if platform == "gpu":
        pool_bytes = stats.get("pool_bytes", 0)
        if pool_bytes < _WHOLE_POOL * limit_bytes:
            return Free(0, "the memory of the devices was not taken at the start")
        limit_bytes = min(limit_bytes, pool_bytes)
    elif platform != "tpu":
        return Free(0, f"nothing is known of the memory of {platform} devices")
    taken_bytes = max(stats["peak_bytes_in_use"], stats.get("bytes_in_use", 0))
    taken_bytes += max(stats.get("peak_bytes_reserved", 0), stats.get("bytes_reserved", 0))
    free_bytes = limit_bytes - taken_bytes
    largest_bytes = stats.get("largest_free_block_bytes", 0)
    if 0 < largest_bytes < free_bytes:
        return Free(largest_bytes, "half of the largest free block")
    return Free(max(free_bytes, 0), "half of what has never been used")


def limit_of_copies(limit: Free | None, free: Free) -> Free:
    """Return what bounds the copies from now on: ``limit`` as before, or ``free`` at this look.

    ``limit``: None at the first look, which comes before the first copies. From then on the peaks
    include these copies, which take at most half of what was unused, so at least the limit is left
    unused as long as training needs no more than before. A limit is never raised.
    """
    if limit is None or free.unused_bytes < limit.nbytes:
        return free
    return limit
