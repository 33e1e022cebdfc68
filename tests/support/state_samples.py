"""States of every kind, and their comparison bit for bit, on the eight CPU devices of the tests."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emergency_ckpt._native import Mapping, crc32c
from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.shard_layout import shard_nbytes
from emergency_ckpt.state import (
    BoxTable,
    HostShard,
    Snapshot,
    SnapshotRecipe,
    StateTree,
    describe,
    dtype_named,
)
from emergency_ckpt.state.link import find_link
from emergency_ckpt.state.mapped import MappedMemory, Mapper
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.state.snapshot import StateStructure
from emergency_ckpt.state.staging import LandingPlace
from emergency_ckpt.types import ShardId

Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


DEVICE_DTYPES = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn"),
)
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")
"""Host values only: the tests leave JAX at 32 bits."""

_LOW_BITS = {"bool": 1, "uint2": 2, "uint4": 4, "float4_e2m1fn": 4}


def random_bits(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """An array whose elements are any bit patterns at all: NaN payloads, -0.0, infinities."""
    kind = dtype_named(dtype)
    count = int(np.prod(shape))
    generator = np.random.Generator(np.random.PCG64(seed))
    raw = generator.integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    if dtype in ("int2", "int4"):  # one element a byte, its sign extended
        bits = int(dtype[3:])
        low = raw.astype(np.int8) << (8 - bits)
        return (low >> (8 - bits)).view(kind).reshape(shape)
    if dtype in _LOW_BITS:
        raw &= (1 << _LOW_BITS[dtype]) - 1
    return raw.view(kind).reshape(shape).copy()


def mesh_of(*shape: int, names: str = "xyz", order: Sequence[int] | None = None) -> Mesh:
    """A mesh over the first devices, taken in ``order``."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count])
    if order is not None:
        devices = devices[list(order)]
    return Mesh(devices.reshape(shape), tuple(names[: len(shape)]))


def placed(whole: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """``whole`` under ``sharding``, bit for bit."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def sharded(whole: np.ndarray, mesh: Mesh, *spec: Any) -> jax.Array:
    return placed(whole, NamedSharding(mesh, P(*spec)))


class Memory:
    """Host memory with a place for each of the shards ``wanted``, mapped for DMA by ``mapper``."""

    def __init__(
        self, tree: StateTree, wanted: Sequence[ShardId], mapper: Mapper | None = None
    ) -> None:
        self._specs = [tree.specs[shard.leaf] for shard in wanted]
        self._shapes = [shape_of(shard.box) for shard in wanted]
        sizes = [shard_nbytes(spec, s.box) for spec, s in zip(self._specs, wanted, strict=True)]
        self.offsets: list[int] = []
        end = 0
        for nbytes in sizes:
            self.offsets.append(-(-end // 64) * 64)
            end = self.offsets[-1] + nbytes
        self._sizes, self.size_bytes = sizes, -(-max(end, 1) // 4096) * 4096
        fd = os.memfd_create("test")
        os.ftruncate(fd, self.size_bytes)
        self.mapping = Mapping(fd, self.size_bytes, writable=True)
        os.close(fd)
        self.bytes = self.mapping.view(0, self.size_bytes, None)
        self.mapped = MappedMemory(mapper, self.bytes.ctypes.data, self.size_bytes)
        self.mapped.map(0, self.size_bytes)

    def target(self, batch_bytes: int = 1 << 40) -> LandingPlace:
        """What a snapshot is read into."""
        return LandingPlace(self.mapping, self.offsets, self.mapped, batch_bytes=batch_bytes)

    def view(self, position: int) -> np.ndarray:
        """A shard that was read; not a copy."""
        begin = self.offsets[position]
        memory = self.bytes[begin : begin + self._sizes[position]]
        return memory.view(dtype_named(self._specs[position].dtype)).reshape(self._shapes[position])

    def read(self, snapshot: Snapshot) -> list[np.ndarray]:
        """Read all of ``snapshot``, with the right checksums; return the shards."""
        landed: dict[int, int] = {}
        snapshot.start()
        for found in snapshot.read_into(self.target()):
            for position, crc, _ in found:
                assert position not in landed
                landed[position] = crc
        assert sorted(landed) == list(range(len(self.offsets)))
        for position, crc in landed.items():
            assert crc == crc32c(self.view(position).tobytes())
        return [self.view(position) for position in sorted(landed)]


def read_state(state: Any, wanted: Sequence[ShardId] | None = None) -> list[np.ndarray]:
    """The shards ``wanted`` of ``state``, or all of this process, as a save would read them."""
    tree = describe(state, "save")
    wanted = BoxTable(tree, 1).shards_of(0) if wanted is None else wanted
    flat = StateStructure(tree).leaves_of(state)
    assert flat is not None
    return Memory(tree, wanted).read(SnapshotRecipe(tree, wanted, find_link()).take(flat))


def on_host(state: Any) -> tuple[StateTree, dict[ShardId, HostShard]]:
    """``state`` described, and its shards as a save of one process would write them."""
    tree = describe(state, "save")
    wanted = BoxTable(tree, 1).shards_of(0)
    views = read_state(state)
    return tree, {shard: HostShard(view, 0) for shard, view in zip(wanted, views, strict=True)}


def through_bytes(state: Any, like: Any = None) -> Any:
    """Describe, snapshot, keep bytes only, and make the state again from them."""
    wanted = BoxTable(describe(state, "test"), 1).shards_of(0)
    views = read_state(state)
    kept = {
        shard: np.ascontiguousarray(view).reshape(-1).view(np.uint8).copy()
        for shard, view in zip(wanted, views, strict=True)
    }
    like = state if like is None else like
    return materialize(describe(like, "test"), like, kept.__getitem__)


def bits(value: Any) -> bytes:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def assert_same(left: Any, right: Any) -> None:
    """Equal structure, types, placement and bits, of every shard on every device."""
    flat_left, tree_left = jax.tree_util.tree_flatten_with_path(left)
    flat_right, tree_right = jax.tree_util.tree_flatten_with_path(right)
    assert tree_left == tree_right
    for (path, a), (_, b) in zip(flat_left, flat_right, strict=True):
        name = jax.tree_util.keystr(path)
        assert type(a) is type(b), name
        if not isinstance(a, jax.Array):
            assert np.asarray(a).dtype == np.asarray(b).dtype, name
            assert np.shape(a) == np.shape(b), name
            assert bits(a) == bits(b), name
            continue
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding), name
        assert getattr(a, "format", None) == getattr(b, "format", None), name
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert (x.device, x.index) == (y.device, y.index), name
            assert bits(x.data) == bits(y.data), f"{name} on {x.device}"


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(dim)[:2] for s, dim in zip(index, shape, strict=True))


def shard_of(path: str, *box: tuple[int, int]) -> ShardId:
    return ShardId(path, tuple(box))
