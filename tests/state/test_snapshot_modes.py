"""Snapshots by each way in which arrays leave devices: JAX's own on CPU, direct ones on a fake."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from fake_link import FakeMachine
from jax.experimental.layout import Format, Layout
from state_samples import DEVICE_DTYPES, Memory, mesh_of, random_bits, sharded

from emergency_ckpt.errors import InvalidState, SaveFailed
from emergency_ckpt.state import dtype_named, link, staging
from emergency_ckpt.state.link import Link, probe
from emergency_ckpt.state.snapshot import DeviceCopies, SnapshotRecipe, copy_on_device
from emergency_ckpt.state.staging import DeviceShard, LandingPlace, Snapshot
from emergency_ckpt.state.tree import BoxTable, describe

SHARD_BYTES = 8 * 64 * 4
LONG_S = 60.0


def by_jax(way: Any) -> Callable[[], Link]:
    return lambda: probe(jax.local_devices()).reading(way)


class Settings(NamedTuple):
    link: Callable[[], Link]
    copy_bytes: int = 0
    bound_bytes: int = 3 * SHARD_BYTES


PINNED = Settings(by_jax("pinned_host"))
DIRECT = Settings(lambda: FakeMachine().link())
COPY_ALL = Settings(by_jax("pinned_host"), 1 << 20)
COPY_SOME = Settings(by_jax("pinned_host"), 3 * SHARD_BYTES)
MODES = {
    "cpu": Settings(by_jax("auto")),
    "cpu, copies": Settings(by_jax("auto"), 3 * SHARD_BYTES),
    "pinned": PINNED,
    "pinned, in pieces": PINNED._replace(bound_bytes=SHARD_BYTES - 1),
    "pageable": Settings(by_jax("pageable")),
    "pageable, in pieces": Settings(by_jax("pageable"), 0, SHARD_BYTES - 1),
    "copies of all": COPY_ALL,
    "copies of some": COPY_SOME,
    "direct": DIRECT,
    "direct, in pieces": DIRECT._replace(bound_bytes=SHARD_BYTES - 1),
    "direct, copies": DIRECT._replace(copy_bytes=1 << 20),
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


class Case:
    """A state, how it is taken, and memory that it is read into."""

    def __init__(self, state: Any, settings: Settings, copies: DeviceCopies | None = None) -> None:
        tree = describe(state, "save")
        self.link = settings.link()
        self.wanted = BoxTable(tree, 1).shards_of(0)
        self.copies = copies or DeviceCopies(settings.copy_bytes)
        self.recipe = SnapshotRecipe(
            tree, self.wanted, self.link, settings.bound_bytes, self.copies
        )
        self.memory = Memory(tree, self.wanted, self.link.mapper)

    def take(self, state: Any) -> Snapshot:
        snapshot = self.recipe.take(jax.tree_util.tree_leaves(state))
        snapshot.start()
        return snapshot


class Reader(threading.Thread):
    """The background half of a save."""

    def __init__(self, snapshot: Snapshot, memory: Memory) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._snapshot = snapshot
        self._memory = memory
        self.start()

    def run(self) -> None:
        try:
            self._memory.read(self._snapshot)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error
        finally:
            self._snapshot.close()

    def result(self) -> list[np.ndarray]:
        self.join(LONG_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return [self._memory.view(position) for position in range(len(self._memory.offsets))]


@pytest.mark.dear
@each_mode
def test_state_may_be_donated_once_the_snapshot_is_captured(settings: Settings) -> None:
    """Many steps; each consumes the state as soon as training may go on."""
    state = new_state()
    case = Case(state, settings)
    for number in range(4):
        keys = np.array(jax.random.key_data(state["keys"]))
        snapshot = case.take(state)
        reader = Reader(snapshot, case.memory)
        assert snapshot.wait_captured(LONG_S)
        state = donating_step({**state, "host": state["host"]})
        state["host"] = np.asarray(state["host"])
        for shard, view in zip(case.wanted, reader.result(), strict=True):
            assert view.shape == tuple(stop - start for start, stop in shard.box), shard
            if shard.leaf == "keys":
                np.testing.assert_array_equal(view, keys)
            else:
                assert (view == number).all(), (number, shard)
    assert is_all_free(case.copies)


@pytest.mark.parametrize("name", ["pinned", "pinned, in pieces", "pageable, in pieces"])
def test_bytes_in_flight_stay_within_the_bound(name: str, monkeypatch: Any) -> None:
    settings = MODES[name]
    case = Case(small_state(), settings)
    in_flight: list[int] = []
    start = staging._start_by_jax

    def noted(flights: Any, bound_bytes: int) -> None:
        in_flight.append(snapshot._in_use_bytes)
        start(flights, bound_bytes)

    monkeypatch.setattr(staging, "_start_by_jax", noted)
    snapshot = case.recipe.take(jax.tree_util.tree_leaves(small_state()))
    case.memory.read(snapshot)
    snapshot.close()
    assert 0 < max(in_flight) <= settings.bound_bytes
    assert snapshot._in_use_bytes == 0


def small_state() -> dict[str, Any]:
    """Six shards on one device, twice what may be in flight."""
    return {f"{i}": sharded(np.zeros((8, 64), np.float32), mesh_of(1)) for i in range(6)}


def pinned_bytes() -> int:
    arrays = jax.live_arrays()
    return sum(each.nbytes for each in arrays if each.sharding.memory_kind == "pinned_host")


def test_reader_that_waits_for_others_costs_no_more_host_memory() -> None:
    """A hundred saves whose reader first waits, as for a slow peer: training waits with it."""
    state = small_state()
    case = Case(state, PINNED)
    before = pinned_bytes()
    for _ in range(100):
        snapshot = case.take(state)
        assert not snapshot.wait_captured(0.0)
        assert 0 < pinned_bytes() - before <= PINNED.bound_bytes
        case.memory.read(snapshot)
        snapshot.close()
        del snapshot
        assert pinned_bytes() == before


@pytest.fixture
def trace_host_memory() -> Iterator[Callable[[], Callable[[], int]]]:
    """Starts to count; what that returns gives the bytes that Python and NumPy have taken since.

    JAX makes its copies on the host as arrays of NumPy.
    """

    def start() -> Callable[[], int]:
        gc.collect()
        gc.freeze()  # so that a collection looks at what the test makes
        tracemalloc.start()
        return lambda: tracemalloc.get_traced_memory()[0]

    yield start
    tracemalloc.stop()
    gc.unfreeze()


PACKED_BYTES = 256 << 10


def packed_state() -> dict[str, Any]:
    """As ``small_state``, of a type that JAX copies to the host on CPU too."""
    value = np.zeros((64, PACKED_BYTES // 64), dtype_named("int4"))
    return {f"{i}": sharded(value, mesh_of(1)) for i in range(6)}


@pytest.mark.parametrize(
    ("name", "saves"),
    [("cpu", 20), ("pageable", 100), ("pageable, in pieces", 10), ("direct", 20)],
)
def test_user_arrays_keep_no_copy_on_the_host(
    name: str,
    saves: int,
    trace_host_memory: Callable[[], Callable[[], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many saves of one state, whose arrays live on."""
    # A thread of JAX lets go of each copy. On a busy machine it comes later than a save waits.
    monkeypatch.setattr(link, "_RELEASE_TRIES", 100_000)
    bound_bytes = PACKED_BYTES - 1 if "pieces" in name else 3 * PACKED_BYTES
    state = packed_state()
    case = Case(state, MODES[name]._replace(bound_bytes=bound_bytes))
    case.memory.read(case.take(packed_state()))
    more_bytes = trace_host_memory()
    copies = [np.asarray(array) for array in packed_state().values()]
    if more_bytes() < sum(copy.nbytes for copy in copies):
        pytest.skip("this JAX makes its copies outside of the memory that Python counts")
    references = [weakref.ref(copy) for copy in copies]
    del copies
    link.release_host_copies(references)
    assert more_bytes() < PACKED_BYTES, "the thread of JAX has let go of these too"
    objects_bytes = PACKED_BYTES // 2  # of Python, at most
    for number in range(saves):
        snapshot = case.take(state)
        assert PACKED_BYTES // 2 < more_bytes() <= bound_bytes + objects_bytes
        for _ in snapshot.read_into(case.memory.target()):
            assert more_bytes() <= bound_bytes + objects_bytes
        snapshot.close()
        del snapshot
        assert more_bytes() <= objects_bytes
        if number % 10 == 9:
            gc.collect()  # of objects in cycles


def test_direct_reader_that_waits_has_nothing_in_flight() -> None:
    machine = FakeMachine()
    state = small_state()
    case = Case(state, Settings(machine.link))
    machine.most_in_flight = 0
    for _ in range(100):
        snapshot = case.take(state)
        assert not snapshot.wait_captured(0.0)
        assert not machine.most_in_flight
        case.memory.read(snapshot)
        snapshot.close()
        assert 0 < machine.most_in_flight <= 3 * SHARD_BYTES
        machine.most_in_flight = 0


def test_direct_reads_go_straight_to_their_place() -> None:
    machine = FakeMachine()
    state = new_state()
    case = Case(state, Settings(machine.link))
    machine.copied.clear()
    case.memory.read(case.take(state))
    shards = zip(case.wanted, case.memory._sizes, strict=True)
    on_devices = sum(nbytes for shard, nbytes in shards if shard.leaf != "host")
    assert machine.copied.total() == on_devices


def test_without_mapped_memory_direct_reads_go_by_jax() -> None:
    machine = FakeMachine()
    state = new_state()
    case = Case(state, Settings(machine.link))
    case.memory.mapped.unmap(LONG_S)
    machine.copied.clear()
    views = case.memory.read(case.take(state))
    assert not machine.copied
    assert all(
        (view == 0).all()
        for shard, view in zip(case.wanted, views, strict=True)
        if shard.leaf != "keys"
    )


def test_memory_mapped_in_part_serves_what_it_holds() -> None:
    machine = FakeMachine()
    state = {"a": sharded(np.arange(4096.0), mesh_of(1)), "b": sharded(np.ones(4096), mesh_of(1))}
    case = Case(state, Settings(machine.link, 0, 1 << 20))
    case.memory.mapped.unmap(LONG_S)
    case.memory.mapped = type(case.memory.mapped)(
        machine, case.memory.mapped.address, case.memory.size_bytes
    )
    for page in range(5):  # in pieces of a page each, which no copy may cross; then it fails
        case.memory.mapped.map(page * 4096, 4096)
    machine.copied.clear()
    first, second = case.memory.read(case.take(state))
    assert np.array_equal(first, np.arange(4096, dtype=first.dtype))
    assert (second == 1).all()
    assert machine.copied.total() == 4 * 4096
    case.memory.mapped.unmap(LONG_S)


def test_lost_device_is_named() -> None:
    machine = FakeMachine()
    state = new_state()
    case = Case(state, Settings(machine.link))
    lost = jax.local_devices()[3]
    machine.lost = {lost.id}
    snapshot = case.take(state)
    reader = Reader(snapshot, case.memory)
    assert snapshot.wait_captured(LONG_S)
    with pytest.raises(SaveFailed, match=f"from device {lost}.*it was lost"):
        reader.result()
    case.memory.mapped.unmap(LONG_S)  # nothing uses it any more
    machine.lost = set()


def test_short_read_fails_the_save() -> None:
    machine = FakeMachine()
    case = Case(new_state(), Settings(machine.link))
    machine.short_bytes = 4
    with pytest.raises(SaveFailed, match="bytes came of"):
        case.memory.read(case.take(new_state()))


def test_close_waits_for_direct_reads_in_progress() -> None:
    machine = FakeMachine()
    state = new_state()
    case = Case(state, Settings(machine.link))
    machine.gate.clear()
    snapshot = case.take(state)
    reader = Reader(snapshot, case.memory)
    while not machine._targets:
        pass
    assert not snapshot.wait_captured(0)
    closing = threading.Thread(target=snapshot.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    machine.gate.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    with pytest.raises(SaveFailed, match="closed before all"):
        reader.result()


def test_layout_that_is_not_linear_goes_by_jax() -> None:
    machine = FakeMachine()
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    plain = sharded(value, mesh_of(1))
    state = {"w": jax.device_put(plain, Format(Layout((1, 0)), plain.sharding)), "x": plain}
    case = Case(state, Settings(machine.link))
    machine.copied.clear()
    for view in case.memory.read(case.take(state)):
        assert np.array_equal(view, value)
    assert machine.copied.total() == value.nbytes


def test_training_thread_does_not_wait_for_what_was_copied() -> None:
    state = new_state()
    # No reader has begun.
    snapshot = Case(state, COPY_ALL).take(state)
    assert snapshot.wait_captured(0)
    jax.block_until_ready(donating_step(state))
    snapshot.close()
    snapshot = Case(new_state(), DIRECT._replace(copy_bytes=1 << 20)).take(new_state())
    assert not snapshot.wait_captured(0)  # the empty leaf is not copied, and its way is direct
    snapshot.close()


def test_with_no_device_memory_for_copies_it_waits() -> None:
    def refuse(arrays: list[jax.Array]) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    state = new_state()
    copies = DeviceCopies(COPY_ALL.copy_bytes, refuse)
    case = Case(state, COPY_ALL, copies)
    snapshot = case.take(state)
    assert is_all_free(copies)
    assert not snapshot.wait_captured(0)
    case.memory.read(snapshot)


def test_another_failure_of_copies_is_not_lack_of_memory() -> None:
    def fail(arrays: list[jax.Array]) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    copies = DeviceCopies(COPY_ALL.copy_bytes, fail)
    state = new_state()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Case(state, COPY_ALL, copies).take(state)
    assert is_all_free(copies)


@pytest.mark.parametrize("settings", [COPY_SOME, MODES["cpu, copies"]], ids=["pinned", "cpu"])
def test_save_of_a_donated_leaf_gives_the_budget_back(settings: Settings) -> None:
    """The copies of the other leaves were made by then."""
    state = new_state()
    case = Case(state, settings)
    for name in ("everywhere", "number"):
        donated = jax.device_put(state[name], state[name].sharding, may_alias=False)
        donated.delete()
        with pytest.raises(InvalidState, match=f"{name}.*donated"):
            case.take({**state, name: donated})
        assert is_all_free(case.copies)
    snapshot = case.take(state)
    assert not is_all_free(case.copies)
    snapshot.close()
    assert is_all_free(case.copies)


def test_budget_is_shared_and_given_back() -> None:
    """While one snapshot's copies fill it, another one waits; a closed snapshot returns it."""
    made: list[int] = []

    def copy(arrays: list[jax.Array]) -> list[jax.Array]:
        made.append(sum(array.nbytes for array in arrays))
        return copy_on_device(arrays)

    state = new_state()
    copies = DeviceCopies(COPY_SOME.copy_bytes, copy)
    case = Case(state, COPY_SOME, copies)
    first = case.take(state)
    assert len(made) == 8
    assert max(made) <= COPY_SOME.copy_bytes
    second = case.take(state)
    assert len(made) == 8
    case.memory.read(second)
    first.close()
    assert is_all_free(copies)
    third = case.take(state)
    assert len(made) == 16
    third.close()


def test_copies_are_let_go_leaf_by_leaf() -> None:
    state = new_state()
    case = Case(state, DIRECT._replace(copy_bytes=1 << 20))
    before = len(jax.live_arrays())
    snapshot = case.take(state)
    made = len(jax.live_arrays()) - before
    assert made > 30
    seen: list[int] = []
    for _ in snapshot.read_into(case.memory.target()):
        seen.append(len(jax.live_arrays()) - before)
    assert seen == sorted(seen, reverse=True)
    assert seen[len(seen) // 2] < made
    snapshot.close()
    assert is_all_free(case.copies)


GIB = 1 << 30


def device(free_gib: int) -> dict[str, int]:
    return {
        "bytes_limit": 100 * GIB,
        "pool_bytes": 100 * GIB,
        "peak_bytes_in_use": (100 - free_gib) * GIB,
    }


def test_copies_begin_after_an_interval_and_are_only_lowered() -> None:
    free = [40, 60]
    copies = DeviceCopies(None, stats=lambda: [("gpu", device(gib)) for gib in free])
    copies.note_save(10)
    copies.note_save(10)  # the other tier
    assert copies.limit_bytes == 0
    copies.note_save(20)
    assert copies.limit_bytes == 20 * GIB
    free[:] = [80, 80]
    copies.note_save(30)
    assert copies.limit_bytes == 20 * GIB
    free[:] = [80, 10]
    copies.note_save(40)
    assert copies.limit_bytes == 5 * GIB
    free[:] = [0, 80]
    copies.note_save(50)
    assert copies.limit_bytes == 0
    free[:] = [80, 80]
    copies.note_save(60)
    assert copies.limit_bytes == 0


def test_limit_is_not_lowered_by_the_copies_themselves() -> None:
    """A state of 15 GiB is copied at each save, above a step of training that leaves 40 unused."""
    free = [40]
    copies = DeviceCopies(None, stats=lambda: [("gpu", device(gib)) for gib in free])
    for step in range(10):
        copies.note_save(step)
        assert copies.limit_bytes == (20 * GIB if step else 0)
        if step:
            free = [40 - 15]


@pytest.mark.parametrize("limit", [0, 7])
def test_copies_that_were_set_stay_as_they_are(limit: int) -> None:
    copies = DeviceCopies(limit, stats=lambda: [("gpu", device(90))])
    for step in range(5):
        copies.note_save(step)
    assert copies.limit_bytes == limit


def test_limit_is_used_once_its_program_is_compiled() -> None:
    state = new_state()
    copies = DeviceCopies(None, stats=lambda: [("gpu", device(80))])
    case = Case(state, COPY_ALL, copies)
    copies.note_save(1)
    case.recipe.prepare()
    copies.note_save(2)
    snapshot = case.take(state)
    assert not snapshot.wait_captured(0)
    snapshot.close()
    case.recipe.prepare()
    snapshot = case.take(state)
    assert snapshot.wait_captured(0)
    snapshot.close()
    copies.limit_bytes = 0
    snapshot = case.take(state)
    assert not snapshot.wait_captured(0)
    snapshot.close()


def test_transfer_that_cannot_start_fails_the_reader_alone() -> None:
    release: list[int] = []
    array = jax.device_put(np.zeros(4, np.float32))
    sources = [
        DeviceShard(
            position,
            array,
            array.nbytes,
            "pinned_host",
            "pinned_host",
            True,
            lambda: release.append(1),
        )
        for position in range(3)
    ]
    array.delete()
    snapshot = Snapshot([], sources)
    snapshot.start()
    assert snapshot.wait_captured(0)
    memory = Memory(describe({"w": np.zeros(4)}, "save"), [])
    with pytest.raises(SaveFailed, match="deleted"):
        list(snapshot.read_into(LandingPlace(memory.mapping, [0, 64, 128])))
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
    case = Case(state, settings)
    with context():
        Reader(case.take(state), case.memory).result()


class GuardedArray:
    """An array on a device that notes the guard: on CPU none guards transfers to the host."""

    nbytes = 4
    shape = (1,)
    dtype = np.dtype(np.float32)

    def __init__(self) -> None:
        self.levels: list[str | None] = []
        self.sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def devices(self) -> set[Any]:
        return self.sharding.device_set

    def copy_to_host_async(self) -> None:
        self.levels.append(jax.config.jax_transfer_guard_device_to_host)

    def is_ready(self) -> bool:
        return True

    def is_deleted(self) -> bool:
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.copy_to_host_async()
        return np.zeros(1, np.float32)


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfers_of_a_save_are_allowed_whatever_the_guard(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user asks for them by saving; the guard is there for those that nobody asked for."""
    array: Any = GuardedArray()
    # An array of the same device memory, which nobody else has.
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *_: array)
    source = DeviceShard(0, array, 4, "pageable", "pageable", True, lambda: None)
    memory = Memory(describe({"w": np.zeros(4)}, "save"), [])
    with jax.transfer_guard(level):
        snapshot = Snapshot([], [source])
        snapshot.start()
        assert snapshot.wait_captured(10)
        assert len(list(snapshot.read_into(LandingPlace(memory.mapping, [0])))) == 1
    assert array.levels == ["allow"] * 2


def test_snapshot_that_was_given_up_is_an_error_to_its_reader() -> None:
    state = new_state()
    case = Case(state, PINNED)
    snapshot = case.take(state)
    assert not snapshot.wait_captured(0)
    snapshot.close()
    assert snapshot.wait_captured(0)
    jax.block_until_ready(donating_step(state))
    for _ in range(2):
        with pytest.raises(SaveFailed, match="closed before all was on the host"):
            case.memory.read(snapshot)


@pytest.mark.parametrize("settings", [PINNED, DIRECT], ids=["pinned", "direct"])
def test_reader_that_stops_half_way_lets_the_training_thread_go(settings: Settings) -> None:
    state = new_state()
    case = Case(state, settings)
    snapshot = case.take(state)
    landed = snapshot.read_into(case.memory.target(1))
    next(landed)
    assert not snapshot.wait_captured(0)
    snapshot.close()
    assert snapshot.wait_captured(LONG_S)
    landed.close()
    case.memory.mapped.unmap(LONG_S)


@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
@pytest.mark.parametrize("bound_bytes", [20, 1 << 20])
@pytest.mark.parametrize("link", [PINNED.link, by_jax("pageable"), DIRECT.link])
def test_bits_are_kept_on_the_way(dtype: str, link: Any, bound_bytes: int) -> None:
    whole = random_bits((16, 4), dtype, seed=2)
    state = {"w": sharded(whole, mesh_of(2), "x"), "none": sharded(whole[:0], mesh_of(1))}
    case = Case(state, Settings(link, 0, bound_bytes))
    shards = dict(zip(case.wanted, case.memory.read(case.take(state)), strict=True))
    found = np.concatenate([shards[shard] for shard in sorted(shards) if shard.leaf == "w"])
    assert found.dtype == whole.dtype
    if dtype in ("int2", "int4"):  # the bits above the value are not part of it
        found, whole = found.astype(np.int8), whole.astype(np.int8)
    assert found.tobytes() == whole.tobytes()


MANY_ROWS = 1 << 31
"""More than a number of 32 bits can count."""


@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
def test_piece_may_begin_at_any_number_of_a_row(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX takes the last rows for those beyond the end; one program serves all numbers."""
    whole = random_bits((8, 3), dtype, seed=4)
    array = jax.device_put(whole, jax.local_devices()[0])
    plain = np.int8 if dtype in ("int2", "int4") else whole.dtype  # as in the test above
    with jax.log_compiles():
        for start in (2, 6, MANY_ROWS, MANY_ROWS << 2):
            piece = np.asarray(staging.part_on_device(array, start, rows=2, lead=1))
            expected = whole[min(start, 6) :][:2]
            assert (
                piece.view(whole.dtype).astype(plain).tobytes() == expected.astype(plain).tobytes()
            ), start
            assert ("Compiling" in caplog.text) == (start == 2)
            caplog.clear()


@pytest.mark.dear
def test_shard_of_more_rows_than_32_bits_count_is_taken() -> None:
    """In 5 GiB of memory."""
    count = MANY_ROWS + 4096
    numbers = partial(jax.lax.broadcasted_iota, np.uint8, (count // 128, 128), 0)
    array = jax.jit(lambda: numbers().reshape(count))()
    case = Case({"w": array}, PINNED._replace(bound_bytes=256 << 20))
    snapshot = case.take({"w": array})
    for _ in snapshot.read_into(case.memory.target()):
        pass
    snapshot.close()
    rows = case.memory.view(0).reshape(-1, 128)
    assert (rows == np.arange(len(rows)).astype(np.uint8)[:, None]).all()


def test_replicated_shards_come_from_all_devices_evenly() -> None:
    machine = FakeMachine()
    mesh = mesh_of(8, order=[6, 1, 4, 3, 0, 7, 2, 5])
    state = {f"{i}": sharded(np.full((4,), i, np.int32), mesh) for i in range(16)}
    state["rows"] = sharded(np.arange(64, dtype=np.int32).reshape(8, 8), mesh, "x")
    case = Case(state, Settings(machine.link))
    machine.copied.clear()
    rows = np.arange(64).reshape(8, 8)
    for shard, view in zip(case.wanted, case.memory.read(case.take(state)), strict=True):
        part = tuple(slice(start, stop) for start, stop in shard.box)
        assert (view == (rows[part] if shard.leaf == "rows" else int(shard.leaf))).all()
    assert set(machine.copied.values()) == {2 * 16 + 8 * 4}
    assert len(machine.copied) == 8


@pytest.mark.parametrize("settings", [PINNED, DIRECT, COPY_ALL], ids=["pinned", "direct", "copies"])
def test_what_was_offloaded_to_the_host_is_saved(settings: Settings) -> None:
    value = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    whole = sharded(value, mesh_of(8), "x")
    state = {"w": jax.device_put(whole, whole.sharding.with_memory_kind("pinned_host"))}
    case = Case(state, settings)
    views = case.memory.read(case.take(state))
    assert np.array_equal(np.concatenate(views), value)
