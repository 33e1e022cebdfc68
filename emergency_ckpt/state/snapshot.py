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

from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.save.snapshot_plan import (
    Buffers,
    DeviceCopyPlan,
    Free,
    Piece,
    choose_sources,
    free_for_copies,
    limit_of_copies,
    plan_device_copies,
    transfer_order,
)
from emergency_ckpt.core.shard_layout import shard_nbytes
from emergency_ckpt.errors import StateMismatch
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.link import Link, Way
from emergency_ckpt.state.staging import (
    DeviceShard,
    Inspect,
    Memory,
    Snapshot,
    inspect_nothing,
    is_over,
    on_one_device,
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
    is_numpy_value,
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
    with on_one_device(arrays[0].devices()):
        return _copy_all(arrays)


def _stats_of_devices() -> list[tuple[str, Mapping[str, int]]]:
    return [(device.platform, device.memory_stats() or {}) for device in jax.local_devices()]


class DeviceCopies:
    """Makes copies and counts their bytes on each device. Thread-safe.

    Sizes are those of the values; a device may pad them. A limit that was not set follows from what
    the devices have free (``core.save.snapshot_plan``). The limit is 0 until a whole interval
    between saves has shown what training needs, and is only ever lowered after that.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        copy: CopyOnDevice = copy_on_device,
        stats: Callable[[], list[tuple[str, Mapping[str, int]]]] = _stats_of_devices,
    ) -> None:
        """``limit_bytes``: maximum on each device; None: what is found free.

        ``stats``: gives the platform and ``memory_stats`` of each device.
        """
        self.limit_bytes = limit_bytes or 0
        self.reason = "set by device_copy_bytes" if limit_bytes is not None else "no interval yet"
        self._is_found = limit_bytes is None
        self._copy = copy
        self._stats = stats
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._last_step: int | None = None
        self._limit: Free | None = None

    def note_save(self, step: int) -> None:
        """Before the copies of a save at ``step``: look again how much is free."""
        if not self._is_found or step == self._last_step:
            return
        is_first, self._last_step = self._last_step is None, step
        if is_first:
            return
        free = [free_for_copies(platform, stats) for platform, stats in self._stats()]
        least = min(free, default=Free(0, "no device"))
        self._limit = limit_of_copies(self._limit, least)
        self.limit_bytes, self.reason = self._limit.nbytes, self._limit.reason

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

    ``way``, ``otherwise``: see ``DeviceShard``; "views" where a view replaces the transfer.
    ``nbytes``: of its values.
    """

    shard: ShardId
    leaf: Leaf
    addressable: int
    device: Device | None
    way: Way
    otherwise: Way
    nbytes: int

    @property
    def piece(self) -> Piece:
        assert self.device is not None
        return Piece(self.leaf.position, self.device.id, self.nbytes)

    @property
    def is_shared(self) -> bool:
        return self.way == "views"

    def like(self) -> jax.ShapeDtypeStruct:
        """Return what describes its array on its device."""
        assert self.device is not None
        there = jax.sharding.SingleDeviceSharding(self.device)
        dtype = dtype_named(self.leaf.spec.dtype)
        return jax.ShapeDtypeStruct(shape_of(self.shard.box), dtype, sharding=there)


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """The copies on the devices for one limit, and the order in which shards leave them.

    Attributes:
      order: of the shards that are transferred.
      shared: those that views replace.
    """

    limit_bytes: int
    copies: DeviceCopyPlan
    order: Sequence[int]
    shared: Sequence[int]


class SnapshotRecipe:
    """Takes the ``shards`` out of states like ``tree``, in that order.

    Built once for a structure of state; see ``StateStructure``.
    """

    def __init__(
        self,
        tree: StateTree,
        shards: Sequence[ShardId],
        link: Link,
        bound_bytes: int = Buffers.staging_bytes,
        copies: DeviceCopies | None = None,
        inspect: Inspect = inspect_nothing,
    ) -> None:
        """``bound_bytes``: of what is in flight; see ``Snapshot``.

        Args:
          copies: shared by all recipes of this process; None for no copies on the devices.
          inspect: called during a wait for arrays, see ``wait_until_ready``.
        """
        self._inspect = inspect
        self._tree = tree
        self._link = link
        self._bound_bytes = bound_bytes
        self._copies = copies or DeviceCopies(0)
        self._takes = _takes(tree, shards, link)
        used = {take.leaf.position for take in self._takes}
        self._keys = sorted(
            leaf.position
            for leaf in tree.leaves
            if leaf.kind is LeafKind.KEYS and leaf.position in used
        )
        self._unused = StateTree(
            tuple(leaf for leaf in tree.leaves if leaf.position not in used), tree.treedef
        )
        self._host_values = [i for i, take in enumerate(self._takes) if take.device is None]
        self._without_copies = self._arrange(0)
        self._prepared = self._arrangement = self._arrange(self._copies.limit_bytes)
        self._is_prepared = False
        self._ways: list[tuple[int, _Way | None, _Take]] = []  # of the shared ones

    def _arrange(self, limit_bytes: int) -> _Arrangement:
        on_devices = [i for i, take in enumerate(self._takes) if take.device is not None]
        pieces = [self._takes[i].piece for i in on_devices]
        plan = plan_device_copies(
            (self._takes[i].piece for i in on_devices if _is_copyable(self._takes[i])), limit_bytes
        )

        def is_shared(i: int) -> bool:
            return self._takes[i].is_shared and self._takes[i].leaf.position not in plan.leaves

        order = [on_devices[i] for i in transfer_order(pieces, plan.leaves)]
        return _Arrangement(
            limit_bytes,
            plan,
            [i for i in order if not is_shared(i)],
            [i for i in on_devices if is_shared(i)],
        )

    def take(self, flat: Sequence[Any]) -> Snapshot:
        """Return the snapshot of the wanted shards. Blocks only on CPU, until they are computed.

        Once ``wait_captured`` of the snapshot is true the state may be donated. On CPU the views
        share the arrays' buffers, which then live on.
        """
        check_values(self._unused, flat, "save")
        try:
            with jax.transfer_guard("allow"):
                return self._take(flat)
        except Exception:
            check_values(self._tree, flat, "save")
            raise

    def prepare(self) -> None:
        """Make what a save needs once: compile the program that copies, and fill JAX's pool.

        Called in a background thread before the first save, and after each save that changed the
        limit. A save before that does without copies. Blocks.
        """
        arrangement = self._prepared
        if arrangement.limit_bytes != self._copies.limit_bytes:
            arrangement = self._arrange(self._copies.limit_bytes)
        elif self._is_prepared:
            return
        for positions in self._by_device(arrangement).values():
            shapes = [self._takes[position].like() for position in positions]
            with jax.transfer_guard("allow"), on_one_device(shapes[0].sharding.device_set):
                _copy_all.lower(shapes).compile()
        if not self._is_prepared:
            self._fill_pool()
        self._prepared, self._is_prepared = arrangement, True

    def _fill_pool(self) -> None:
        """Let JAX's pool of pinned memory grow to what is in flight: it never shrinks."""
        devices = [take.device for take in self._takes if take.way == "pinned_host"]
        if devices and devices[0] is not None and devices[0].platform != "cpu":
            there = jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
            nbytes = min(self._bound_bytes, sum(take.nbytes for take in self._takes))
            with jax.transfer_guard("allow"):
                jax.block_until_ready(jax.device_put(np.zeros(nbytes, np.uint8), there))

    def _arrange_now(self) -> _Arrangement:
        """Return what this save does: no copies if the limit was lowered since the last plan."""
        arrangement = self._prepared
        if arrangement.limit_bytes > self._copies.limit_bytes:
            arrangement = self._without_copies
        if arrangement is not self._arrangement:
            self._arrangement, self._ways = arrangement, []
        return arrangement

    def _by_device(self, arrangement: _Arrangement) -> dict[int, list[int]]:
        """Return the shards to copy, by the id of their device."""
        of_device: dict[int, list[int]] = {}
        for position, take in enumerate(self._takes):
            if take.leaf.position in arrangement.copies.leaves and take.device is not None:
                of_device.setdefault(take.device.id, []).append(position)
        return of_device

    def _take(self, flat: Sequence[Any]) -> Snapshot:
        plan = self._arrange_now()
        stored = flat
        if self._keys:
            stored = list(flat)
            for position in self._keys:
                stored[position] = jax.random.key_data(flat[position])
        copied = self._copy_on_devices(stored) if plan.copies.leaves else {}
        try:
            return self._snapshot(plan, stored, copied)
        except BaseException:  # such as a leaf without values, or a process that left
            for position in copied:
                self._give_back(position)
            raise

    def _snapshot(
        self, plan: _Arrangement, stored: Sequence[Any], copied: Mapping[int, jax.Array]
    ) -> Snapshot:
        """Return the snapshot of ``stored``, which gives the budget of ``copied`` back later."""
        memories, ready_s = self._hold(stored)
        views: list[tuple[int, Memory]] = list(zip(plan.shared, memories, strict=True))
        for position in self._host_values:
            leaf = self._takes[position].leaf
            # The next step may change host values in place; they are small, so they are copied.
            value = np.array(stored[leaf.position], dtype=dtype_named(leaf.spec.dtype))
            views.append((position, value))
        sources: list[DeviceShard] = []
        for position in plan.order:
            take, copy = self._takes[position], copied.get(position)
            if take.is_shared and copy is None:
                views.append((position, np.asarray(_data(take, stored))))
                continue
            assert take.device is not None
            source = DeviceShard(
                position,
                _data(take, stored) if copy is None else copy,
                take.nbytes,
                take.otherwise if take.is_shared else take.way,
                take.otherwise,
                waited_for=copy is None,
            )
            if copy is not None:
                source.release = partial(self._give_back, position)
            sources.append(source)
        # If another snapshot uses the budget, nothing is copied and training waits for all.
        sources.sort(key=lambda source: not source.waited_for)
        return Snapshot(views, sources, self._bound_bytes, dma=self._link.dma, ready_s=ready_s)

    def _give_back(self, position: int) -> None:
        """Give the budget of the copy of a shard back."""
        take = self._takes[position]
        assert take.device is not None
        self._copies.give_back(take.device.id, take.nbytes)

    def _hold(self, stored: Sequence[Any]) -> tuple[list[Memory], float]:
        """Return the memory of the shards that views replace, which outlives their arrays.

        And the seconds of the wait until these arrays were computed.
        """
        ready_s = 0.0
        shared_takes = [self._takes[i] for i in self._arrangement.shared]
        if not self._ways:
            shared = (stored[take.leaf.position] for take in shared_takes)
            ready_s = wait_until_ready(shared, self._inspect)
            # The fastest way to each shard's memory is the same at every save.
            self._ways = [
                (take.leaf.position, _way_to(take, stored), take) for take in shared_takes
            ]
        memories: list[Memory] = []
        try:
            # The loop is one pass: with thousands of leaves each leaf is out of the processor's
            # caches.
            for position, way, take in self._ways:
                array = stored[position]
                if not is_over(array):
                    ready_s += wait_until_ready((array,), self._inspect)
                memories.append(memoryview(array) if way is None else way(take, stored))
        except BufferError:  # not as it was: the error below says more, if it is one
            memories = [_array(take, stored) for take in shared_takes]
        return memories, ready_s

    def _copy_on_devices(self, stored: Sequence[Any]) -> dict[int, jax.Array]:
        """Return the planned copies by position; empty when there is no room for them now."""
        plan, of_device = self._arrangement.copies, self._by_device(self._arrangement)
        made = self._copies.make(
            {
                device: [_data(self._takes[position], stored) for position in positions]
                for device, positions in of_device.items()
            },
            plan.device_bytes,
        )
        if made is None:
            return {}
        return {
            position: copy
            for device, positions in of_device.items()
            for position, copy in zip(positions, made[device], strict=True)
        }


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

    A leaf has a buffer if this process has all of it on one device, and its type is known to the
    buffer protocol.
    """
    for way, memory in ((None, stored[take.leaf.position]), (_buffer, _data(take, stored))):
        try:
            if memoryview(memory).nbytes == take.nbytes:
                return way
        except BufferError:
            continue
    return _array


def _takes(tree: StateTree, shards: Sequence[ShardId], link: Link) -> list[_Take]:
    """Return the source of each wanted shard, spread evenly over the devices that hold it."""
    leaves = {leaf.spec.path: leaf for leaf in tree.leaves}
    holders = [_holders(leaves[shard.leaf], shard) for shard in shards]
    for i, by_device in enumerate(holders):
        first = next(iter(by_device), None)
        if first is not None and link.way == "views":
            # All devices share one memory, and the first device is found fastest.
            holders[i] = {first: by_device[first]}
    sizes = [shard_nbytes(leaves[shard.leaf].spec, shard.box) for shard in shards]
    on_devices = [i for i, by_device in enumerate(holders) if by_device]
    chosen = choose_sources(
        [[device.id for device in holders[i]] for i in on_devices], [sizes[i] for i in on_devices]
    )
    source = dict(zip(on_devices, chosen, strict=True))
    takes: list[_Take] = []
    for i, shard in enumerate(shards):
        leaf = leaves[shard.leaf]
        device = next((device for device in holders[i] if device.id == source[i]), None)
        index = 0 if device is None else holders[i][device]
        way, otherwise = ("views", "views") if device is None else link.ways_of(device, leaf)
        takes.append(_Take(shard, leaf, index, device, way, otherwise, sizes[i]))
    return takes


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
    indices = {device: index for index, (device, box) in enumerate(mine) if box == shard.box}
    if not indices:
        raise StateMismatch(
            "save",
            f"leaf {shard.leaf!r}",
            [f"{shard.leaf}: box {shard.box} is not on this process"],
        )
    return indices


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
        # Values of another byte order have the same name and are stored alike.
        is_named = is_numpy_value(value) and value.dtype.name == leaf.spec.dtype
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
