"""Device to host: a snapshot of the shards that this process stores, by the training thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from absl import logging

from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import (
    Buffers,
    Piece,
    StagingMemory,
    choose_sources,
    plan_device_copies,
    transfer_order,
)
from emergency_ckpt.core.shard_layout import shard_nbytes
from emergency_ckpt.errors import StateMismatch
from emergency_ckpt.state.dtypes import PACKED_DTYPES, dtype_named
from emergency_ckpt.state.staging import (
    Inspect,
    Memory,
    Snapshot,
    Transfer,
    inspect_nothing,
    is_over,
    wait_until_ready,
)
from emergency_ckpt.state.tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    boxes_by_device,
    check_values,
    is_key_type,
    is_python_number,
)
from emergency_ckpt.types import ShardId

CopyOnDevice = Callable[[list[jax.Array]], list[jax.Array]]


@jax.jit
def _copy_all(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.numpy.copy(array) for array in arrays]


def copy_on_device(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return copies of arrays of one device, made by one program on that device.

    No other process takes part, and it runs between the steps dispatched before and after.
    """
    (device,) = arrays[0].devices()
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    # Under the caller's mesh, with more devices, JAX refuses these; a NaN is a value like others.
    with jax.set_mesh(mesh), jax.debug_nans(False), jax.debug_infs(False):
        return _copy_all(arrays)


class DeviceCopies:
    """Makes copies and counts their bytes on each device. Thread-safe.

    Sizes are those of the values; a device may pad them.
    """

    def __init__(self, limit_bytes: int, copy: CopyOnDevice = copy_on_device) -> None:
        """``limit_bytes``: maximum on each device."""
        self.limit_bytes = limit_bytes
        self._copy = copy
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}

    def make(
        self, sources: Mapping[int, Sequence[jax.Array]], needs: Mapping[int, int]
    ) -> dict[int, list[jax.Array]] | None:
        """Return copies of the single-device arrays ``sources``, by device id, in their order.

        Does not block; the sources may be donated then. None when the copies of another snapshot
        use too much of the budget, or a device has no memory left; the caller then waits for the
        transfer. ``needs`` (bytes by device id) counts as used until ``give_back``.
        """
        with self._lock:
            if any(self._used.get(d, 0) + n > self.limit_bytes for d, n in needs.items()):
                return None
            for device, nbytes in needs.items():
                self._used[device] = self._used.get(device, 0) + nbytes
        try:
            return {device: self._copy(list(arrays)) for device, arrays in sources.items()}
        except BaseException as error:
            for device, nbytes in needs.items():
                self.give_back(device, nbytes)
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                logging.warning("no device memory for the copies of a snapshot: %s", error)
                return None
            raise

    def give_back(self, device: int, nbytes: int) -> None:
        """Return ``nbytes`` of ``device`` to the budget, after the copy was released."""
        with self._lock:
            self._used[device] -= nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Take:
    """The source of one shard: its leaf, its index among addressable shards, and its device.

    ``is_shared``: a view replaces the transfer. ``memory``: target of the transfer, see
    ``Transfer``. ``nbytes``: of its values.
    """

    shard: ShardId
    leaf: Leaf
    addressable: int
    device: Device | None
    is_shared: bool
    memory: str | None
    nbytes: int

    @property
    def piece(self) -> Piece:
        assert self.device is not None
        return Piece(self.leaf.position, self.device.id, self.nbytes)


class SnapshotRecipe:
    """Takes the shards ``wanted`` out of states like ``tree``, in that order.

    Built once for a structure of state; see ``StateStructure``.
    """

    def __init__(
        self,
        tree: StateTree,
        wanted: Sequence[ShardId],
        config: Config | None = None,
        buffers: Buffers = Buffers(),  # noqa: B008  frozen
        copies: DeviceCopies | None = None,
        inspect: Inspect = inspect_nothing,
    ) -> None:
        """``config``: None for the settings' defaults.

        Args:
          copies: for ``device_copy``, shared by all recipes of this process.
          inspect: called during a wait for arrays, see ``wait_until_ready``.
        """
        self._inspect = inspect
        self._tree = tree
        self._config = config = config or Config()
        self._buffers = buffers
        self._copies = copies or DeviceCopies(config.device_copy_bytes)
        self._takes = _takes(tree, wanted, buffers.staging_memory)
        used = {take.leaf.position for take in self._takes}
        self._keys = sorted(
            leaf.position
            for leaf in tree.leaves
            if leaf.kind is LeafKind.KEYS and leaf.position in used
        )
        self._unused = StateTree(
            tuple(leaf for leaf in tree.leaves if leaf.position not in used), tree.treedef
        )
        on_devices = [i for i, take in enumerate(self._takes) if take.device is not None]
        pieces = [self._takes[i].piece for i in on_devices]
        self._plan = plan_device_copies(
            (self._takes[i].piece for i in on_devices if _is_copyable(self._takes[i])),
            self._copies.limit_bytes if config.snapshot_mode == "device_copy" else 0,
        )
        order = (on_devices[i] for i in transfer_order(pieces, self._plan.leaves))
        self._order = [
            position
            for position in order
            if not self._takes[position].is_shared
            or self._takes[position].leaf.position in self._plan.leaves
        ]
        self._host_values = [i for i, take in enumerate(self._takes) if take.device is None]
        self._shared = [
            i
            for i, take in enumerate(self._takes)
            if take.is_shared and take.leaf.position not in self._plan.leaves
        ]
        self._ways: list[tuple[int, _Way | None, _Take]] = []  # of the shared ones

    def take(self, flat: Sequence[Any]) -> Snapshot:
        """Return the snapshot of the wanted shards, as ``wait`` or ``device_copy``.

        Does not block, but on CPU until the arrays are computed.
        Once its ``wait_captured`` is true the state may be donated. On CPU the views share the
        arrays' buffers, which then live on.
        """
        check_values(self._unused, flat, "save")
        try:
            with jax.transfer_guard("allow"):
                return self._take(flat)
        except Exception:
            check_values(self._tree, flat, "save")
            raise

    def _take(self, flat: Sequence[Any]) -> Snapshot:
        stored = flat
        if self._keys:
            stored = list(flat)
            for position in self._keys:
                stored[position] = jax.random.key_data(flat[position])
        copied = self._copy_on_devices(stored) if self._plan.leaves else {}
        waits = self._config.snapshot_mode != "auto"
        held, ready_s = self._hold(stored)
        views: list[tuple[int, Memory]] = list(zip(self._shared, held, strict=True))
        for position in self._host_values:
            leaf = self._takes[position].leaf
            # The next step may change host values in place; they are small, so they are copied.
            value = np.array(stored[leaf.position], dtype=dtype_named(leaf.spec.dtype))
            views.append((position, value))
        transfers: list[Transfer] = []
        for position in self._order:
            take, copy = self._takes[position], copied.get(position)
            if take.is_shared and copy is None:
                views.append((position, np.asarray(_data(take, stored))))
                continue
            assert take.device is not None
            transfers.append(
                Transfer(
                    position,
                    _data(take, stored) if copy is None else copy,
                    take.nbytes,
                    take.memory,
                    waited_for=copy is None,
                    release=_nothing
                    if copy is None
                    else partial(self._copies.give_back, take.device.id, take.nbytes),
                )
            )
        # If another snapshot uses the budget, nothing is copied and training waits for all.
        return Snapshot(
            views,
            transfers,
            self._buffers.staging_bytes,
            waits_for_views=waits and len(views) > len(self._host_values),
            ready_s=ready_s,
        )

    def _hold(self, stored: Sequence[Any]) -> tuple[list[Memory], float]:
        """Return the memory of the shards that views replace; it outlives their arrays.

        Also the seconds of the wait until they were computed.
        """
        ready_s = 0.0
        if not self._ways:
            shared = (stored[self._takes[i].leaf.position] for i in self._shared)
            ready_s = wait_until_ready(shared, self._inspect)
            self._find_ways(stored)
        held: list[Memory] = []
        try:
            # In one pass: with thousands of leaves each one is out of the processor's caches.
            for position, way, take in self._ways:
                array = stored[position]
                if not is_over(array):
                    ready_s += wait_until_ready((array,), self._inspect)
                held.append(memoryview(array) if way is None else way(take, stored))
        except BufferError:  # not as it was: the error below says more, if it is one
            held = [_array(self._takes[i], stored) for i in self._shared]
        return held, ready_s

    def _find_ways(self, stored: Sequence[Any]) -> None:
        """Find the fastest way to each shard's memory, which is the same at every save."""
        self._ways = [
            (take.leaf.position, _way_to(take, stored), take)
            for take in (self._takes[i] for i in self._shared)
        ]

    def _copy_on_devices(self, stored: Sequence[Any]) -> dict[int, jax.Array]:
        """Return the planned copies by position; empty when there is no room for them now."""
        of_device: dict[int, list[int]] = {}
        for position, take in enumerate(self._takes):
            if take.leaf.position in self._plan.leaves and take.device is not None:
                of_device.setdefault(take.device.id, []).append(position)
        made = self._copies.make(
            {
                device: [_data(self._takes[position], stored) for position in positions]
                for device, positions in of_device.items()
            },
            self._plan.device_bytes,
        )
        if made is None:
            return {}
        return {
            position: copy
            for device, positions in of_device.items()
            for position, copy in zip(positions, made[device], strict=True)
        }


def _nothing() -> None:
    pass


def _data(take: _Take, stored: Sequence[Any]) -> jax.Array:
    value = stored[take.leaf.position]
    if take.addressable == 0 and value.is_fully_replicated:
        # Without an array for each of the other devices.
        return value.addressable_data(0)
    return value.addressable_shards[take.addressable].data


def _array(take: _Take, stored: Sequence[Any]) -> npt.NDArray[Any]:
    return np.asarray(_data(take, stored))


def _buffer(take: _Take, stored: Sequence[Any]) -> memoryview:
    return memoryview(_data(take, stored))  # pyright: ignore[reportArgumentType]


_Way = Callable[[_Take, Sequence[Any]], Memory]


def _way_to(take: _Take, stored: Sequence[Any]) -> _Way | None:
    """Return how to get a shard's memory; None: it is the buffer of the leaf itself.

    The leaf itself has a buffer where this process has the whole of it on one device. Types that
    the buffer protocol does not know have none.
    """
    for way, memory in ((None, stored[take.leaf.position]), (_buffer, _data(take, stored))):
        try:
            if memoryview(memory).nbytes == take.nbytes:
                return way
        except BufferError:
            continue
    return _array


def _takes(tree: StateTree, wanted: Sequence[ShardId], staging: StagingMemory) -> list[_Take]:
    """Return the source of each wanted shard, spread evenly over the devices that hold it."""
    leaves = {leaf.spec.path: leaf for leaf in tree.leaves}
    holders = [_holders(leaves[shard.leaf], shard) for shard in wanted]
    for i, held in enumerate(holders):
        first = next(iter(held), None)
        if first is not None and _is_shared(first, staging):
            holders[i] = {
                first: held[first]
            }  # all share one memory, and the first is found fastest
    sizes = [shard_nbytes(leaves[shard.leaf].spec, shard.box) for shard in wanted]
    on_devices = [i for i, held in enumerate(holders) if held]
    chosen = choose_sources(
        [[device.id for device in holders[i]] for i in on_devices], [sizes[i] for i in on_devices]
    )
    source = dict(zip(on_devices, chosen, strict=True))
    takes: list[_Take] = []
    for i, shard in enumerate(wanted):
        leaf = leaves[shard.leaf]
        device = next((device for device in holders[i] if device.id == source[i]), None)
        index = 0 if device is None else holders[i][device]
        shared = device is not None and _is_shared(device, staging)
        memory = None if device is None else _memory(device, leaf.spec.dtype, staging)
        takes.append(_Take(shard, leaf, index, device, shared, memory, sizes[i]))
    return takes


def _is_shared(device: Device, staging: StagingMemory) -> bool:
    """Return whether a view of a device's array replaces the transfer."""
    return device.platform == "cpu" and staging == "auto"


def _memory(device: Device, dtype: str, staging: StagingMemory) -> str | None:
    """Return the host memory that ``device`` transfers to; None for JAX's own transfer."""
    if staging == "pageable" or _is_shared(device, staging):
        return None
    if dtype in PACKED_DTYPES:
        return None  # packed on the device; only JAX's own transfer writes one byte for each
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else None


def _is_copyable(take: _Take) -> bool:
    """Return whether a copy stays on the device; false for values offloaded to the host."""
    assert take.leaf.sharding is not None
    assert take.device is not None
    kind = take.leaf.sharding.memory_kind
    return take.nbytes > 0 and kind in (None, take.device.default_memory().kind)


def _holders(leaf: Leaf, shard: ShardId) -> dict[Device, int]:
    """Return this process's devices that hold the shard, with its index; none for host values."""
    if leaf.sharding is None:
        return {}
    me = jax.process_index()
    mine = [(d, box) for d, box in boxes_by_device(leaf).items() if d.process_index == me]
    found = {device: index for index, (device, box) in enumerate(mine) if box == shard.box}
    if not found:
        raise StateMismatch(
            "save",
            f"leaf {shard.leaf!r}",
            [f"{shard.leaf}: box {shard.box} is not on this process"],
        )
    return found


_PLACED = attrgetter("aval", "sharding")
"""All by which an array's leaf may differ: its type for JAX, with shape and dtype, and its place.

Both in one visit of the leaf, because each visit takes a third of a microsecond. The dtype of keys
names their implementation.
"""


class StateStructure:
    """Finds the leaves of states like ``tree``. For one thread.

    A training step returns new arrays with the shardings, shapes and dtypes of the step before, as
    the very same objects, so these are compared as one list: equal objects are equal without a
    look into them, and all others are compared by their values.
    """

    def __init__(self, tree: StateTree) -> None:
        self._treedef = tree.treedef
        # With dtypes as objects, because a dtype's name is built anew at each access.
        leaves = sorted(
            ((leaf, dtype_named(leaf.spec.dtype)) for leaf in tree.leaves),
            key=lambda pair: pair[0].position,
        )
        self._arrays = [pair for pair in leaves if pair[0].sharding is not None]
        self._host_values = [pair for pair in leaves if pair[0].sharding is None]
        self._seen: list[object] = []

    def leaves_of(self, state: PyTree) -> list[Any] | None:
        """Return the leaves in the pytree's order, or None when ``state`` has another structure.

        Does not look for values: see ``tree.check_values``.
        """
        try:
            # Also takes a whole subtree for a leaf, which the checks below refuse.
            flat: list[Any] = self._treedef.flatten_up_to(state)
        except (ValueError, TypeError):
            return None
        if not all(_is_like(leaf, dtype, flat[leaf.position]) for leaf, dtype in self._host_values):
            return None
        arrays = flat
        if self._host_values:
            arrays = [flat[leaf.position] for leaf, _ in self._arrays]
        return flat if self._are_like(arrays) else None

    def _are_like(self, arrays: Sequence[Any]) -> bool:
        seen: list[object] = []
        with contextlib.suppress(AttributeError):  # a description, or no array at all
            seen = list(map(_PLACED, arrays))
            if seen == self._seen:
                return True
        if not all(
            _is_like(leaf, dtype, value)
            for (leaf, dtype), value in zip(self._arrays, arrays, strict=True)
        ):
            return False
        self._seen = seen
        return True


def _is_like(leaf: Leaf, dtype: np.dtype[Any], value: Any) -> bool:
    if leaf.kind is LeafKind.SCALAR:
        # A Python number may change its type from step to step.
        return is_python_number(value) and np.asarray(value).dtype == dtype
    if leaf.kind is LeafKind.NUMPY:
        is_host = isinstance(value, np.ndarray | np.generic)
        # Values of another byte order have the same name and are stored alike.
        is_named = is_host and value.dtype.name == leaf.spec.dtype
        return is_named and value.shape == leaf.spec.global_shape
    if not isinstance(value, jax.Array) and not jax.tree_util.all_leaves([value]):
        return False
    sharding = getattr(value, "sharding", None)
    if sharding is not leaf.sharding and sharding != leaf.sharding:
        return False
    if leaf.kind is LeafKind.ARRAY:
        return value.shape == leaf.spec.global_shape and value.dtype == dtype
    return (
        is_key_type(value.dtype)
        and value.shape == leaf.spec.global_shape[:-1]  # key data have one more dimension
        and str(jax.random.key_impl(value)) == leaf.spec.key_impl
    )
