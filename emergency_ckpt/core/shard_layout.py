"""Sizes of shards, and the layout of one process's shards in a slot. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import msgspec

from emergency_ckpt.types import (
    LARGE_SHARD_BYTES,
    PAGE_ALIGNMENT_BYTES,
    SHARD_ALIGNMENT_BYTES,
    Box,
    Contents,
    LeafSpec,
    ShardId,
)

DTYPE_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int1", "uint1", "int2", "uint2", "int4", "uint4"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"), 1),
    **dict.fromkeys(("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one stored element of each dtype that may be stored."""


class PlacedShard(msgspec.Struct, frozen=True):
    """A shard and its place in a slot, before its CRC is known."""

    shard: ShardId
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """Places of all shards of one process, in manifest order, and the bytes they need."""

    shards: tuple[PlacedShard, ...]
    size_bytes: int

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Return (offset, nbytes) of each shard."""
        return tuple((placed.offset, placed.nbytes) for placed in self.shards)


def shard_nbytes(spec: LeafSpec, box: Box) -> int:
    """Return the bytes of the part ``box`` of ``spec`` as stored. KeyError for an unknown dtype."""
    return prod(stop - start for start, stop in box) * DTYPE_ITEM_BYTES[spec.dtype]


def lay_out(leaves: Sequence[LeafSpec], shards: Iterable[tuple[ShardId, int]]) -> Layout:
    """Give each (shard, nbytes) its offset, in order of (leaf path, box).

    Offsets are aligned to 64 bytes, those of shards from ``LARGE_SHARD_BYTES`` on to a page. Pure,
    and independent of the order of ``shards``, so that replicas that store the same shards get
    equal contents. ValueError for a duplicate, an unknown leaf or a wrong ``nbytes``.
    """
    specs = {spec.path: spec for spec in leaves}
    placed: list[PlacedShard] = []
    end = 0
    for shard, nbytes in sorted(shards):
        if placed and placed[-1].shard == shard:
            raise ValueError(f"lay out {shard}: it is named twice")
        if shard.leaf not in specs:
            raise ValueError(f"lay out {shard}: its leaf is not among the leaves")
        expected = shard_nbytes(specs[shard.leaf], shard.box)
        if nbytes != expected:
            raise ValueError(f"lay out {shard}: {nbytes} bytes given, its box has {expected}")
        is_large = nbytes >= LARGE_SHARD_BYTES
        alignment = PAGE_ALIGNMENT_BYTES if is_large else SHARD_ALIGNMENT_BYTES
        offset = -(-end // alignment) * alignment
        placed.append(PlacedShard(shard=shard, offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return Layout(shards=tuple(placed), size_bytes=end)


def layout_digest(leaves: Iterable[LeafSpec], shards: Iterable[ShardId]) -> str:
    """Return a short name of a set of shards of a state; replicas that store the same share it.

    The name tells nothing of the bytes, and is the same for every save of the state.

    Args:
      leaves: all leaves of the state.
      shards: sorted.
    """
    return digest_of((digest_of(sorted(leaves)), tuple(shards)))


def shards_by_set(
    leaves: Iterable[LeafSpec], shards: Sequence[ShardId], groups: Iterable[int]
) -> dict[str, list[int]]:
    """Return the sets of some shards: the positions in ``shards``, by the name of each set.

    A name is the ``layout_digest`` of the set.

    Args:
      groups: of each shard, a number that shards share which the same processes need.
    """
    positions: dict[int, list[int]] = {}
    for position, group in enumerate(groups):
        positions.setdefault(group, []).append(position)
    of_leaves = digest_of(sorted(leaves))  # once, since a state may have many leaves
    return {digest_of((of_leaves, [shards[p] for p in some])): some for some in positions.values()}


def shard_sets(contents: Contents, groups: Iterable[int]) -> dict[str, str]:
    """Return the sets of shards in a manifest: the digest of each one's CRCs, by its name.

    Manifests that have all shards of a group have the name in common, and the digest too unless
    their bytes differ. ``groups``: as in ``shards_by_set``.
    """
    shards = [contents.shard_id(index) for index in range(len(contents.shards))]
    return {
        name: digest_of([contents.shards[position].crc32c for position in positions])
        for name, positions in shards_by_set(contents.leaves, shards, groups).items()
    }


def digest_of(value: object) -> str:
    """Return a digest of a JSON value. 128 bits, hex."""
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:32]


def state_size_bytes(leaves: Iterable[LeafSpec]) -> int:
    """Return the bytes of a state with ``leaves``; of unknown dtypes none."""
    return sum(prod(leaf.global_shape) * DTYPE_ITEM_BYTES.get(leaf.dtype, 0) for leaf in leaves)
