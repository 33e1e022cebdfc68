"""Snapshots that pass through staging memory, as on accelerators: pinned host memory of the CPU."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from state_samples import DEVICE_DTYPES, mesh_of, random_bits, read_at_once, sharded

from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import Buffers, SnapshotMode, StagingMemory
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.snapshot import DeviceCopies, SnapshotRecipe, copy_on_device
from emergency_ckpt.state.staging import Snapshot, Transfer
from emergency_ckpt.state.tree import BoxTable, describe

SHARD_BYTES = 8 * 64 * 4
LONG_S = 60.0


class Settings(NamedTuple):
    config: Config
    buffers: Buffers = Buffers()


def settings_of(
    mode: SnapshotMode,
    device_copy_bytes: int = 0,
    staging_bytes: int = Buffers.staging_bytes,
    memory: StagingMemory = "auto",
) -> Settings:
    config = Config(snapshot_mode=mode, device_copy_bytes=device_copy_bytes)
    return Settings(config, Buffers(staging_bytes, memory))


WAIT = settings_of("wait", 0, 3 * SHARD_BYTES, "pinned_host")
PAGEABLE = settings_of("wait", 0, 3 * SHARD_BYTES, "pageable")
COPY_ALL = settings_of("device_copy", 1 << 20, 3 * SHARD_BYTES, "pinned_host")
COPY_SOME = settings_of("device_copy", 3 * SHARD_BYTES, 3 * SHARD_BYTES, "pinned_host")
COPY_ON_CPU = settings_of("device_copy", 3 * SHARD_BYTES)
WAIT_ON_CPU = settings_of("wait")
MODES = {
    "wait": WAIT,
    "pageable": PAGEABLE,
    "copy_all": COPY_ALL,
    "copy_some": COPY_SOME,
    "copy_on_cpu": COPY_ON_CPU,
    "wait_on_cpu": WAIT_ON_CPU,
}
each_mode = pytest.mark.parametrize("settings", MODES.values(), ids=MODES)


def new_state() -> dict[str, Any]:
    mesh = mesh_of(8)
    return {
        "large": [sharded(np.zeros((64, 64), np.float32), mesh, "x") for _ in range(6)],
        "everywhere": sharded(np.zeros((8, 64), np.float32), mesh),
        "number": sharded(np.zeros((), np.int32), mesh),
        "keys": jax.random.wrap_key_data(sharded(np.array([3, 4], np.uint32), mesh)),
        "empty": sharded(np.zeros((0, 3), np.float32), mesh),
        "host": np.zeros(5, np.float32),
    }


def is_all_free(copies: DeviceCopies) -> bool:
    """True when the whole budget of every device can be taken; it is given back."""
    whole = {device.id: copies.limit_bytes for device in jax.local_devices()}
    if copies.make({}, whole) is None:
        return False
    for device, nbytes in whole.items():
        copies.give_back(device, nbytes)
    return True


@partial(jax.jit, donate_argnums=0)
def donating_step(state: Any) -> Any:
    return {
        name: jax.random.fold_in(value, 1)
        if name == "keys"
        else jax.tree.map(lambda x: x + 1, value)
        for name, value in state.items()
    }


def recipe_for(
    state: Any, settings: Settings, copies: DeviceCopies | None = None
) -> tuple[SnapshotRecipe, tuple[Any, ...]]:
    tree = describe(state, "save")
    wanted = BoxTable(tree, 1).shards_of(0)
    return SnapshotRecipe(tree, wanted, *settings, copies), wanted


class Reader(threading.Thread):
    """The background half of a save: copies what it reads, one batch after the other."""

    def __init__(self, snapshot: Snapshot, limit_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.found: dict[int, np.ndarray] = {}
        self.batch_bytes: list[int] = []
        self.error: BaseException | None = None
        self._snapshot = snapshot
        self._limit_bytes = limit_bytes
        self.start()

    def run(self) -> None:
        try:
            for batch in self._snapshot.batches(self._limit_bytes):
                self.batch_bytes.append(sum(view.nbytes for _, view in batch))
                for position, view in batch:
                    assert position not in self.found
                    self.found[position] = np.array(view)
                del view
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error
        finally:
            self._snapshot.close()

    def result(self) -> list[np.ndarray]:
        self.join(LONG_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return [self.found[position] for position in sorted(self.found)]


@each_mode
def test_state_may_be_donated_once_the_snapshot_is_captured(settings: Settings) -> None:
    """Many steps; each consumes the state as soon as training may go on."""
    state = new_state()
    copies = DeviceCopies(settings.config.device_copy_bytes)
    recipe, wanted = recipe_for(state, settings, copies)
    readers: list[tuple[np.ndarray, Reader]] = []
    for _ in range(8):
        keys = np.array(jax.random.key_data(state["keys"]))
        flat = jax.tree_util.tree_leaves(state)
        snapshot = recipe.take(flat)
        del flat
        reader = Reader(snapshot)
        assert snapshot.wait_captured(LONG_S)
        state = donating_step({**state, "host": state["host"]})
        state["host"] = np.asarray(state["host"])
        readers.append((keys, reader))
    for number, (keys, reader) in enumerate(readers):
        views = reader.result()
        assert len(views) == len(wanted)
        for shard, view in zip(wanted, views, strict=True):
            assert view.shape == tuple(stop - start for start, stop in shard.box), shard
            if shard.leaf == "keys":
                np.testing.assert_array_equal(view, keys)
            else:
                assert (view == number).all(), (number, shard)
    assert is_all_free(copies)


def started_and_donated(settings: Settings) -> tuple[Snapshot, tuple[Any, ...]]:
    """A snapshot of which all was started, and whose state the next step has overwritten."""
    state = new_state()
    recipe, wanted = recipe_for(state, settings)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    snapshot.start(everything=True)
    assert snapshot.wait_captured(LONG_S)
    jax.block_until_ready(donating_step(state))
    return snapshot, wanted


@each_mode
def test_state_may_be_donated_before_the_reader_if_all_started(
    settings: Settings,
) -> None:
    """Nobody waits for the reader, as with a save whose word is still to come."""
    snapshot, wanted = started_and_donated(settings)
    views = Reader(snapshot).result()
    for shard, view in zip(wanted, views, strict=True):
        assert shard.leaf == "keys" or (view == 0).all()


@each_mode
def test_all_at_once(settings: Settings) -> None:
    gc.collect()
    before = pinned_bytes()
    snapshot, wanted = started_and_donated(settings)
    found = read_at_once(snapshot)
    assert [view.shape for view in found] == [
        tuple(stop - start for start, stop in shard.box) for shard in wanted
    ]
    size_bytes = 0
    for shard, view in zip(wanted, found, strict=True):
        assert shard.leaf == "keys" or (view == 0).all()
        size_bytes += 0 if shard.leaf == "host" else view.nbytes
    is_pinned = settings.buffers.staging_memory == "pinned_host"
    assert pinned_bytes() - before == (size_bytes if is_pinned else 0)


def pinned_bytes() -> int:
    arrays = jax.live_arrays()
    return sum(each.nbytes for each in arrays if each.sharding.memory_kind == "pinned_host")


def test_what_is_not_yet_read_stays_within_the_staging_memory() -> None:
    state = new_state()
    recipe, _ = recipe_for(state, WAIT)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    before = pinned_bytes()
    alive: list[int] = []
    for batch in snapshot.batches(1 << 30):
        alive.append(pinned_bytes() - before)
        assert batch
    snapshot.close()
    assert max(alive) > 0
    assert max(alive) <= WAIT.buffers.staging_bytes
    assert len(alive) > 6 * 8 * SHARD_BYTES // WAIT.buffers.staging_bytes


def test_shard_larger_than_the_staging_memory_goes_alone() -> None:
    state = new_state()
    small = settings_of("wait", 0, 1, "pinned_host")
    recipe, wanted = recipe_for(state, small)
    reader = Reader(recipe.take(jax.tree_util.tree_leaves(state)))
    assert len(reader.result()) == len(wanted)
    assert max(reader.batch_bytes) == SHARD_BYTES


def test_training_thread_does_not_wait_for_what_was_copied() -> None:
    state = new_state()
    recipe, _ = recipe_for(state, COPY_ALL)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    # No reader has begun.
    assert not snapshot.wait_captured(0)  # nothing to copy in the empty leaf
    del state["empty"]
    recipe, wanted = recipe_for(state, COPY_ALL)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    assert snapshot.wait_captured(0)
    jax.block_until_ready(donating_step(state))
    assert len(Reader(snapshot).result()) == len(wanted)


def test_with_no_device_memory_for_copies_it_waits() -> None:
    def refuse(arrays: list[jax.Array]) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    state = new_state()
    copies = DeviceCopies(COPY_ALL.config.device_copy_bytes, refuse)
    recipe, wanted = recipe_for(state, COPY_ALL, copies)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    assert is_all_free(copies)
    assert not snapshot.wait_captured(0)
    assert len(Reader(snapshot).result()) == len(wanted)


def test_another_failure_of_copies_is_not_lack_of_memory() -> None:
    def fail(arrays: list[jax.Array]) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    copies = DeviceCopies(COPY_ALL.config.device_copy_bytes, fail)
    state = new_state()
    recipe, _ = recipe_for(state, COPY_ALL, copies)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        recipe.take(jax.tree_util.tree_leaves(state))
    assert is_all_free(copies)


def test_budget_is_shared_and_given_back() -> None:
    """While one snapshot's copies fill it, another one waits; a closed snapshot returns it."""
    made: list[int] = []

    def copy(arrays: list[jax.Array]) -> list[jax.Array]:
        made.append(sum(array.nbytes for array in arrays))
        return copy_on_device(arrays)

    state = new_state()
    copies = DeviceCopies(COPY_SOME.config.device_copy_bytes, copy)
    recipe, wanted = recipe_for(state, COPY_SOME, copies)
    flat = jax.tree_util.tree_leaves(state)
    first = recipe.take(flat)
    assert len(made) == 8
    assert max(made) <= COPY_SOME.config.device_copy_bytes
    second = recipe.take(flat)
    assert len(made) == 8
    assert len(Reader(second).result()) == len(wanted)
    first.close()
    assert is_all_free(copies)
    third = recipe.take(flat)
    assert len(made) == 16
    third.close()


def test_transfer_that_cannot_start_fails_the_reader_alone() -> None:
    release: list[int] = []
    source = jax.device_put(np.zeros(4, np.float32))
    transfers = [
        Transfer(position, source, source.nbytes, "pinned_host", True, lambda: release.append(1))
        for position in range(3)
    ]
    source.delete()
    snapshot = Snapshot([], transfers, None)
    snapshot.start()
    assert snapshot.wait_captured(0)
    with pytest.raises(RuntimeError, match="deleted"):
        list(snapshot.batches(1 << 30))
    snapshot.close()
    snapshot.close()
    assert len(release) == 3


@each_mode
@pytest.mark.parametrize(
    "context",
    [lambda: jax.set_mesh(mesh_of(8)), lambda: jax.debug_nans(True)],
    ids=["mesh", "nans"],
)
def test_snapshot_is_taken_in_any_context_of_jax(settings: Settings, context: Any) -> None:
    state = new_state()
    state["large"][0] = sharded(np.full((64, 64), np.nan, np.float32), mesh_of(8), "x")
    recipe, wanted = recipe_for(state, settings)
    with context():
        found = Reader(recipe.take(jax.tree_util.tree_leaves(state))).result()
    assert len(found) == len(wanted)


class GuardedSource:
    """An array on a device that notes the guard: on CPU none guards transfers to the host."""

    nbytes = 4

    def __init__(self) -> None:
        self.levels: list[str | None] = []

    def copy_to_host_async(self) -> None:
        self.levels.append(jax.config.jax_transfer_guard_device_to_host)

    def is_ready(self) -> bool:
        return True

    is_deleted = is_ready

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.copy_to_host_async()
        return np.zeros(1, np.float32)


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfers_of_a_save_are_allowed_whatever_the_guard(level: str) -> None:
    """A user asks for them by saving; the guard is there for those that nobody asked for."""
    source: Any = GuardedSource()
    transfers = [Transfer(0, source, source.nbytes, None, True, lambda: None)]
    with jax.transfer_guard(level):
        snapshot = Snapshot([], transfers, None)
        snapshot.start()
        assert snapshot.wait_captured(10)
        assert len(list(snapshot.batches(1 << 30))) == 1
    assert source.levels == ["allow"] * 2


def test_snapshot_that_was_given_up_is_an_error_to_its_reader() -> None:
    state = new_state()
    recipe, _ = recipe_for(state, WAIT)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    assert not snapshot.wait_captured(0)
    snapshot.close()
    assert snapshot.wait_captured(0)
    jax.block_until_ready(donating_step(state))
    with pytest.raises(SaveFailed, match="closed before all was on the host"):
        list(snapshot.batches(1 << 30))
    with pytest.raises(SaveFailed, match="closed before all was on the host"):
        read_at_once(snapshot)


def test_reader_that_stops_half_way_lets_the_training_thread_go() -> None:
    recipe, _ = recipe_for(new_state(), WAIT)
    snapshot = recipe.take(jax.tree_util.tree_leaves(new_state()))
    batches = snapshot.batches(1)
    next(batches)
    assert not snapshot.wait_captured(0)
    snapshot.close()
    assert snapshot.wait_captured(LONG_S)


def test_on_cpu_waiting_ends_when_reader_has_let_go_of_state() -> None:
    views = [(i, np.zeros(10, np.uint8)) for i in range(4)]
    snapshot = Snapshot(views, waits_for_views=True)
    batches = snapshot.batches(20)
    assert [position for position, _ in next(batches)] == [0, 1]
    assert not snapshot.wait_captured(0)
    assert [position for position, _ in next(batches)] == [2, 3]
    assert not snapshot.wait_captured(0)
    assert next(batches, None) is None
    assert snapshot.wait_captured(0)


@pytest.mark.parametrize("memory", ["pinned_host", "pageable"])
@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
def test_bits_are_kept_on_the_way(dtype: str, memory: Any) -> None:
    whole = random_bits((16, 4), dtype, seed=2)
    state = {"w": sharded(whole, mesh_of(8), "x")}
    recipe, wanted = recipe_for(state, settings_of("wait", 0, 64, memory))
    views = Reader(recipe.take(jax.tree_util.tree_leaves(state))).result()
    found = np.concatenate([view for _, view in sorted(zip(wanted, views, strict=True))])
    assert found.dtype == whole.dtype
    if dtype in ("int2", "int4"):  # the bits above the value are not part of it
        found, whole = found.astype(np.int8), whole.astype(np.int8)
    assert found.tobytes() == whole.tobytes()


def test_replicated_shards_come_from_all_devices_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    order = [6, 1, 4, 3, 0, 7, 2, 5]
    mesh = mesh_of(8, order=order)
    state = {f"{i}": sharded(np.full((4,), i, np.int32), mesh) for i in range(16)}
    state["rows"] = sharded(np.arange(64, dtype=np.int32).reshape(8, 8), mesh, "x")
    recipe, wanted = recipe_for(state, WAIT)
    snapshot = recipe.take(jax.tree_util.tree_leaves(state))
    per_device: Counter[Any] = Counter()
    put = jax.device_put

    def counted(sources: list[jax.Array], *args: Any, **kwargs: Any) -> Any:
        for source in sources:
            (device,) = source.devices()
            per_device[device] += source.nbytes
        return put(sources, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", counted)
    rows = np.arange(64).reshape(8, 8)
    for shard, view in zip(wanted, read_at_once(snapshot), strict=True):
        part = tuple(slice(start, stop) for start, stop in shard.box)
        assert (view == (rows[part] if shard.leaf == "rows" else int(shard.leaf))).all()
    assert set(per_device.values()) == {2 * 16 + 8 * 4}
    assert len(per_device) == 8


def test_what_was_offloaded_to_the_host_is_copied_not_shared() -> None:
    """JAX would hand out the same memory for a transfer to where the array is."""
    state = {"w": sharded(np.zeros((64, 64), np.float32), mesh_of(8), "x")}
    kind = state["w"].sharding.with_memory_kind("pinned_host")
    offloaded = {"w": jax.device_put(state["w"], kind)}
    recipe, _ = recipe_for(offloaded, COPY_ALL)
    snapshot = recipe.take(jax.tree_util.tree_leaves(offloaded))
    snapshot.start(everything=True)
    shards = [np.asarray(shard.data) for shard in offloaded["w"].addressable_shards]
    for view, shard in zip(read_at_once(snapshot), shards, strict=True):
        assert not np.shares_memory(view, shard)
