"""Plan of a snapshot: the shards that are copied on their device, and the order of transfers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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

    A leaf is copied on all its devices or on none. Leaves are taken largest first while they fit,
    so no omitted leaf fits into the remaining bytes. Where all pieces lie on one device and each is
    within the limit, this copies at least half of the bytes of the best choice.
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
