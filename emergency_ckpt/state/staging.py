"""One snapshot on its way to the host: a bounded number of bytes at a time, read as they arrive.

The training thread makes it and waits until the state may be donated; one background thread reads
it into the memory that keeps it. Shards move in pieces, of which no more than the bound are in
flight, whoever waits for whom. See ``state.link`` for the ways in which a piece moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from emergency_ckpt import _native
from emergency_ckpt.background import copy_threads
from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import CheckpointError, SaveFailed
from emergency_ckpt.state.dtypes import NO_VALUES, ValuePattern, dtype_named
from emergency_ckpt.state.link import (
    Dma,
    DmaCopy,
    Way,
    begin_transfers,
    is_linear,
    release_host_copies,
)
from emergency_ckpt.state.mapped import MappedMemory
from emergency_ckpt.state.tree import Device
from emergency_ckpt.types import Box, LeafSpec

Inspect = Callable[[], None]
"""Called at intervals during a wait; an error that it raises ends the wait."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
_FIRST_INSPECTION_S = 1.0
_BETWEEN_INSPECTIONS_S = 0.25


def wait_until_ready(arrays: Iterable[Any], inspect: Inspect) -> float:
    """Wait until all ``arrays`` have been computed, or have failed; return the seconds of the wait.

    JAX's own wait cannot be ended: where a process has died, the arrays of the others are never
    ready. ``inspect`` is called after a second, and from then on; its error ends the wait.
    """
    began_s = now_s = time.monotonic()
    next_inspection_s = began_s + _FIRST_INSPECTION_S
    for array in arrays:
        while not is_over(array):
            time.sleep(min(max(_SHORTEST_PAUSE_S, (now_s - began_s) / 100), _LONGEST_PAUSE_S))
            now_s = time.monotonic()
            if now_s >= next_inspection_s:
                next_inspection_s = now_s + _BETWEEN_INSPECTIONS_S
                inspect()
    return time.monotonic() - began_s


def is_over(array: Any) -> bool:
    """Return whether the computation of ``array`` has ended: a read does not wait for it."""
    # ``is_ready`` of a deleted array may end the process; a read of such an array is an error.
    return array.is_deleted() or array.is_ready()


def inspect_nothing() -> None:
    """Never end a wait."""


Memory = memoryview | npt.NDArray[Any]
"""Elements of a shard on the host, in their shape; contiguous or not."""


def flat_bytes(view: Memory) -> Memory:
    """Return contiguous bytes; extension types have no buffer interface of their own."""
    if type(view) is memoryview and view.c_contiguous:
        return view
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


@dataclasses.dataclass(slots=True, eq=False)
class DeviceShard:
    """Shard number ``position`` in device memory, on its way in pieces.

    Attributes:
      array: on one device.
      nbytes: of the values as they are stored: more than the array's for packed types.
      way: the best way. "direct" needs mapped memory; ``otherwise`` is taken without such memory.
      waited_for: the training thread waits for the transfer; otherwise ``array`` is a copy.
      release: called once when ``array`` is no longer needed.
      begun_bytes, chosen: the bytes whose transfer has begun, and the way that was taken.
    """

    position: int
    array: jax.Array
    nbytes: int
    way: Way
    otherwise: Way
    waited_for: bool
    release: Callable[[], None] = lambda: None
    begun_bytes: int = dataclasses.field(default=0, init=False)
    chosen: Way | None = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class LandingPlace:
    """Host memory that a snapshot is read into.

    Attributes:
      offsets: of each shard by its position, in bytes of ``mapping``.
      mapped: what of ``mapping`` is mapped for DMA; None where nothing is.
      patterns: the values to count in each shard; none to count nothing.
      batch_bytes: of one native call that copies.
    """

    mapping: _native.Mapping
    offsets: Sequence[int]
    mapped: MappedMemory | None = None
    patterns: Sequence[ValuePattern] = ()
    batch_bytes: int = Buffers.copy_batch_bytes


class Landed(NamedTuple):
    """A shard whose bytes are in the target; ``matches``: how many values were counted."""

    position: int
    crc32c: int
    matches: int


class _Arrived(NamedTuple):
    """Bytes of a shard from ``offset`` on. ``view``: None where they are in the target already."""

    position: int
    offset: int
    nbytes: int
    view: Memory | None


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """A piece of a shard on its way: an array of JAX on the host, or copies of the device."""

    source: DeviceShard
    offset: int
    nbytes: int
    way: Way
    array: Any = None  # ``is_ready`` is public but missing in JAX's array type
    copies: Sequence[DmaCopy] = ()
    _landed: npt.NDArray[Any] | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def has_ended(self) -> bool:
        """Return whether the bytes are on the host, or never will be."""
        if self.way == "direct":
            return all(copy.has_ended for copy in self.copies)
        return self.array.is_ready()

    def land(self) -> npt.NDArray[Any] | None:
        """Wait for the bytes; return them, or None where they are in the target. Any thread.

        SaveFailed, with the name of the device, where they do not come.
        """
        try:
            if self.way == "direct":
                came = sum(copy.wait() for copy in self.copies)
                if came != self.nbytes:
                    raise OSError(f"{came} bytes came of {self.nbytes}")
                return None
            with self._lock:  # a source that was donated meanwhile cannot be read again
                if self._landed is None:
                    with jax.transfer_guard("allow"):
                        self._landed = np.asarray(jax.block_until_ready(self.array))
                return self._landed
        except (CheckpointError, OSError, RuntimeError) as error:
            raise _lost(self.source, error) from error


def _lost(source: DeviceShard, error: BaseException) -> SaveFailed:
    if source.array.is_deleted():
        return SaveFailed("read", f"shard {source.position}", f"its array was deleted: {error}")
    device = ", ".join(str(holder) for holder in source.array.devices())
    return SaveFailed("read", f"a shard from device {device}", str(error))


@dataclasses.dataclass(frozen=True, slots=True)
class HostShard:
    """One shard in host memory that is kept until it is written, with the CRC32C of its bytes."""

    view: npt.NDArray[Any]
    crc32c: int

    @staticmethod
    def of_bytes(memory: npt.NDArray[np.uint8], spec: LeafSpec, box: Box, crc32c: int) -> HostShard:
        """Return the shard ``box`` of the leaf ``spec`` whose bytes are ``memory``, not copied."""
        view = memory.view(dtype_named(spec.dtype)).reshape(shape_of(box))
        return HostShard(view, crc32c)


class Snapshot:
    """The shards that one save reads; see the module. Always to be closed; read once."""

    def __init__(
        self,
        views: Iterable[tuple[int, Memory]],
        sources: Sequence[DeviceShard] = (),
        bound_bytes: int = Buffers.staging_bytes,
        *,
        dma: Dma | None = None,
        ready_s: float = 0.0,
    ) -> None:
        """``sources`` move in their order, those with ``waited_for`` first.

        Args:
          views: shards by position that are readable on the host already.
          bound_bytes: most bytes in flight, or one element.
          dma: for the way "direct".
          ready_s: seconds that the training thread has waited for arrays still being computed.
        """
        self.ready_s = ready_s
        self._computed = [source.array for source in sources if source.waited_for]
        self._views = deque(views)
        self._waiting = deque(sources)
        self._held = set(sources)  # not released
        self._started: deque[_Flight] = deque()
        self._bound_bytes = bound_bytes
        self._dma = dma
        self._in_use_bytes = 0
        self._target: LandingPlace | None = None
        self._is_mapped = False
        self._lock = threading.Lock()
        self._closed = False
        self._failure: Exception | None = None
        self._nothing_to_start = threading.Event()  # among those waited for
        self._waited_for: set[_Flight] = set()  # started, and not landed
        self._note_progress()

    # Before reading.

    def start(self) -> None:
        """Start what the bound allows, but for direct reads, which need the target's memory.

        Does not block; never raises.
        """
        with self._lock:
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 - the reader raises it
                self._fail(error)
            self._note_progress()

    def wait_captured(self, timeout_s: float, inspect: Inspect = inspect_nothing) -> bool:
        """Wait until the state may be donated; return False after ``timeout_s`` for the reader.

        Transfers in progress have no deadline, because a device that does not answer also stops the
        next step; an error of ``inspect`` ends the wait. ``ready_s`` grows by the time until the
        devices have computed what is transferred.
        """
        self.ready_s += wait_until_ready(self._computed, inspect)
        self._computed = []
        if not self._nothing_to_start.wait(timeout_s):
            return False
        with self._lock:
            flights = deque(self._waited_for)
        # The array of a pageable transfer is as ready as its source.
        pinned = [flight.array for flight in flights if flight.way == "pinned_host"]
        wait_until_ready(pinned, inspect)
        try:
            while flights:  # what has landed is the reader's alone
                flights.popleft().land()
        except SaveFailed as error:
            with self._lock:
                self._fail(error)
        return True

    # Called by the reader.

    def read_into(self, target: LandingPlace) -> Iterator[list[Landed]]:
        """Bring all shards into ``target``; yield lists of those that have arrived. Blocks.

        SaveFailed: a transfer failed, in either thread, with the device's name; or the snapshot was
        closed before all was read.
        """
        mapped = target.mapped
        with contextlib.ExitStack() as stack:
            if mapped is not None and self._dma is not None:
                self._is_mapped = stack.enter_context(mapped.transfer())
            stack.callback(self._end_direct)
            with self._lock:
                self._target = target
            yield from self._read_views(target)
            yield from self._read_pieces(target)
        with self._lock:
            self._check_open()

    def close(self) -> None:
        """Release all unread shards; further reads raise an error. Idempotent.

        Waits for direct reads in progress, since the next step may write to their sources.
        """
        with self._lock:
            self._closed = self._closed or bool(self._views or self._waiting or self._started)
            flights = [flight for flight in self._started if flight.way == "direct"]
            for source in self._held:
                source.release()
            self._held.clear()
            self._waiting.clear()
            self._started.clear()
            self._views.clear()
            self._computed = []
            self._nothing_to_start.set()
            flights += [flight for flight in self._waited_for if flight.way == "direct"]
            self._waited_for.clear()
        _wait_for_direct(flights)

    def _end_direct(self) -> None:
        """Wait until nothing is written to the target any more, also after an error."""
        with self._lock:
            flights = [flight for flight in self._started if flight.way == "direct"]
        _wait_for_direct(flights)

    def _read_views(self, target: LandingPlace) -> Iterator[list[Landed]]:
        while True:
            batch: list[_Arrived] = []
            size_bytes = 0
            with self._lock:
                while self._views:
                    position, view = self._views[0]
                    size_bytes += view.nbytes
                    if batch and size_bytes > target.batch_bytes:
                        break
                    batch.append(_Arrived(position, 0, view.nbytes, view))
                    del view
                    self._views.popleft()
            if not batch:
                return
            yield _settle(target, batch)

    def _read_pieces(self, target: LandingPlace) -> Iterator[list[Landed]]:
        # A batch has half of the bound at most, so that the next pieces are in flight while a batch
        # is read.
        limit_bytes = min(target.batch_bytes, max(self._bound_bytes // 2, 1))
        begun: dict[int, tuple[int, int, int]] = {}  # position: bytes there, their CRC, matches
        staged_bytes = 0
        copies: list[weakref.ref[npt.NDArray[Any]]] = []  # that JAX made on the host
        while self._go_on(staged_bytes, copies):
            copies.clear()
            batch: list[_Arrived] = []
            ended: list[DeviceShard] = []
            read_bytes = staged_bytes = 0
            while (flight := self._next(limit_bytes - read_bytes, at_once=bool(batch))) is not None:
                view, source = self._land(flight), flight.source
                batch.append(_Arrived(source.position, flight.offset, flight.nbytes, view))
                read_bytes += flight.nbytes
                if view is not None:
                    staged_bytes += flight.nbytes
                    if view.flags.owndata:
                        copies.append(weakref.ref(view))
                if flight.offset + flight.nbytes == source.nbytes:
                    ended.append(source)
                del flight, view, source
            with self._lock:
                for source in self._held.intersection(ended):
                    source.release()
                    self._held.discard(source)
            whole = {source.position for source in ended}
            del ended
            pieces = _settle(target, batch)
            sizes = [arrived.nbytes for arrived in batch]
            del batch
            landed: list[Landed] = []
            for piece, nbytes in zip(pieces, sizes, strict=True):
                there, crc, matches = begun.pop(piece.position, (0, 0, 0))
                joined = _native.crc32c_combine(crc, piece.crc32c, nbytes)
                begun[piece.position] = (there + nbytes, joined, matches + piece.matches)
            for position in whole:
                _, crc, matches = begun.pop(position)
                landed.append(Landed(position, crc, matches))
            yield landed

    def _go_on(self, staged_bytes: int, copies: Sequence[weakref.ref[npt.NDArray[Any]]]) -> bool:
        """Give ``staged_bytes`` back and start more; return False when no piece is left."""
        if copies:
            release_host_copies(copies)
        self._wait_computed()
        with self._lock:
            self._in_use_bytes -= staged_bytes
            self._start()
            self._note_progress()
            return bool(self._started)

    def _wait_computed(self) -> None:
        """Wait for the next array: a direct read does not wait for what computes it."""
        with self._lock:
            self._check_open()
            if self._started or not self._waiting or self._waiting[0].way != "direct":
                return
            array = self._waiting[0].array
        wait_until_ready([array], self._inspect_open)

    def _inspect_open(self) -> None:
        with self._lock:
            self._check_open()

    def _next(self, room_bytes: int, *, at_once: bool) -> _Flight | None:
        """Return the next piece; ``at_once``: only a finished one, of at most ``room_bytes``."""
        with self._lock:
            if not self._started:
                return None
            first = self._started[0]
            if at_once and (first.nbytes > room_bytes or not first.has_ended):
                return None
            return first

    def _land(self, flight: _Flight) -> npt.NDArray[Any] | None:
        view = flight.land()
        with self._lock:
            self._check_open()
            self._started.popleft()
            self._waited_for.discard(flight)
            if view is None:
                self._in_use_bytes -= flight.nbytes
                self._start()
                self._note_progress()
        return view

    # Called with the lock held.

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise SaveFailed("read", "snapshot", "it was closed before all was on the host")

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._nothing_to_start.set()

    def _start(self) -> None:
        """Start as many pieces as the bound has room for, those of JAX in one call."""
        by_jax: list[_Flight] = []
        while self._waiting and self._failure is None:
            source = self._waiting[0]
            way = self._way_of(source)
            if way is None:
                break
            part_bytes = _part_bytes(source, way, self._bound_bytes)
            nbytes = min(part_bytes, source.nbytes - source.begun_bytes)
            if self._in_use_bytes and self._in_use_bytes + nbytes > self._bound_bytes:
                break
            flight = _Flight(source, source.begun_bytes, nbytes, way)
            if way == "direct":
                if not is_over(source.array):
                    break
                flight.copies = self._copy_directly(flight)
            else:
                by_jax.append(flight)
            source.begun_bytes += nbytes
            self._in_use_bytes += nbytes
            self._started.append(flight)
            if source.waited_for:
                self._waited_for.add(flight)
            if source.begun_bytes == source.nbytes:
                self._waiting.popleft()
        if not by_jax:
            return
        try:
            _start_by_jax(by_jax, self._bound_bytes)
        except Exception as error:
            self._started = deque(flight for flight in self._started if flight not in by_jax)
            self._waited_for.difference_update(by_jax)
            failure = _lost(by_jax[0].source, error)
            self._fail(failure)
            raise failure from error

    def _way_of(self, source: DeviceShard) -> Way | None:
        """Return the way of all pieces; None for a direct read whose target is not known yet."""
        if source.chosen is None:
            if source.way != "direct":
                source.chosen = source.otherwise
            elif self._target is None:
                return None
            else:
                source.chosen = "direct" if self._reaches(source) else source.otherwise
        return source.chosen

    def _reaches(self, source: DeviceShard) -> bool:
        """Return whether a device can copy ``source`` to its place as it is."""
        assert self._target is not None
        mapped, offset = self._target.mapped, self._target.offsets[source.position]
        if not self._is_mapped or mapped is None or mapped.parts(offset, source.nbytes) is None:
            return False
        return is_linear(source.array)

    def _copy_directly(self, flight: _Flight) -> list[DmaCopy]:
        target, source = self._target, flight.source
        assert target is not None
        assert target.mapped is not None
        assert self._dma is not None
        begin = target.offsets[source.position] + flight.offset
        parts = target.mapped.parts(begin, flight.nbytes)
        assert parts is not None, "a mapping does not shrink under a transfer"
        try:
            return [
                self._dma.copy(
                    source.array,
                    flight.offset + offset - begin,
                    target.mapped.address + offset,
                    nbytes,
                )
                for offset, nbytes in parts
            ]
        except (CheckpointError, OSError, RuntimeError) as error:
            raise _lost(source, error) from error

    def _note_progress(self) -> None:
        """Record that the awaited transfers have begun, once none of them is left to start."""
        if not (self._waiting and self._waiting[0].waited_for):
            self._nothing_to_start.set()


def _wait_for_direct(flights: Iterable[_Flight]) -> None:
    for flight in flights:
        for copy in flight.copies:
            # Its end alone matters: nobody uses the bytes, and the reader tells of a failure.
            with contextlib.suppress(CheckpointError, OSError, RuntimeError):
                copy.wait()


def _settle(target: LandingPlace, batch: Sequence[_Arrived]) -> list[Landed]:
    """Copy to the target the pieces that are not there yet; return each CRC32C, in order."""
    threads, patterns = copy_threads(), target.patterns
    landed: dict[int, Landed] = {}
    for in_place in (False, True):
        indices = [i for i, piece in enumerate(batch) if (piece.view is None) is in_place]
        if not indices:
            continue
        batch_patterns = [patterns[batch[i].position] if patterns else NO_VALUES for i in indices]
        places = [target.offsets[batch[i].position] + batch[i].offset for i in indices]
        if in_place:
            ranges = [(at, batch[i].nbytes) for at, i in zip(places, indices, strict=True)]
            read = _native.check_and_count(target.mapping, ranges, batch_patterns, threads)
        else:
            views = (batch[i].view for i in indices)
            copies = [
                (flat_bytes(view), at)
                for view, at in zip(views, places, strict=True)
                if view is not None
            ]
            read = _native.copy_and_count(target.mapping, copies, batch_patterns, threads)
        for i, crc, count in zip(indices, *read, strict=True):
            landed[i] = Landed(batch[i].position, crc, count)
    return [landed[i] for i in range(len(batch))]


_DIRECT_PIECES = 4
"""In flight at once, so that the CRC of one is computed while the others come."""


def _part_bytes(source: DeviceShard, way: Way, bound_bytes: int) -> int:
    """Return the size of the pieces of a source, all alike but the last."""
    if way == "direct":
        return max(bound_bytes // _DIRECT_PIECES // 8 * 8, 8)
    rows, _, row_bytes = _rows(source, bound_bytes)
    return max(rows * row_bytes, 1)


def _rows(source: DeviceShard, bound_bytes: int) -> tuple[int, int, int]:
    """Return (rows of a piece, leading dimensions that make up the rows, bytes of a row).

    One piece has all where the bound allows it, and for an array that is not in a device's own
    memory, because no program can cut that.
    """
    array = source.array
    if source.nbytes <= bound_bytes:
        return 1, 0, source.nbytes
    (device,) = array.devices()
    if array.sharding.memory_kind not in (None, device.default_memory().kind):
        return 1, 0, source.nbytes
    shape, item_bytes = array.shape, source.nbytes // max(prod(array.shape), 1)
    most_bytes = max(bound_bytes // 2, item_bytes)
    lead = next(n for n in range(1, len(shape) + 1) if prod(shape[n:]) * item_bytes <= most_bytes)
    row_bytes = prod(shape[lead:]) * item_bytes
    return max(most_bytes // row_bytes, 1), lead, row_bytes


_FULL_FLOAT_BITS = 32


@partial(jax.jit, static_argnames=("rows", "lead"))
def _part(array: jax.Array, start: int, *, rows: int, lead: int) -> jax.Array:
    """Return the bits of some rows, as unsigned integers where the values are narrow floats.

    A program may move a narrow float by way of a wider one, which changes the bits of some NaNs:
    XLA of jax 0.12 does so on CPU, with float8 and float4.
    """
    if jnp.issubdtype(array.dtype, jnp.floating):
        bits = jnp.finfo(array.dtype).bits
        if bits < _FULL_FLOAT_BITS:
            array = jax.lax.bitcast_convert_type(array, f"uint{bits}")
    in_rows = array.reshape((-1, *array.shape[lead:]))
    return jax.lax.dynamic_slice_in_dim(in_rows, start, rows)


@contextlib.contextmanager
def on_one_device(devices: set[Device]) -> Generator[None]:
    """Run programs on the one of ``devices``, in any context of the caller's.

    Under the caller's mesh, with more devices, JAX refuses them; a NaN is a value like others.
    """
    (device,) = devices
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    with jax.set_mesh(mesh), jax.debug_nans(False), jax.debug_infs(False):
        yield


def part_on_device(array: jax.Array, start: int, *, rows: int, lead: int) -> jax.Array:
    """Return the bits of ``rows`` rows from row ``start`` of an array on one device, made there.

    The first ``lead`` dimensions make up the rows. See ``_part`` for the type.
    """
    # Without x64 JAX takes numbers of rows for 32 bits, and a shard may have more rows.
    with jax.enable_x64(True), jax.transfer_guard("allow"), on_one_device(array.devices()):
        return _part(array, start, rows=rows, lead=lead)


def _start_by_jax(flights: Sequence[_Flight], bound_bytes: int) -> None:
    """Start transfers that JAX makes, in one call where they go to pinned memory.

    What moves is the array of the source, or rows of it that its device cuts out.
    """
    pieces: list[jax.Array] = []
    for flight in flights:
        array = flight.source.array
        if flight.nbytes < flight.source.nbytes:
            _, lead, row_bytes = _rows(flight.source, bound_bytes)
            start, rows = flight.offset // row_bytes, flight.nbytes // row_bytes
            array = part_on_device(array, start, rows=rows, lead=lead)
        pieces.append(array)
    arrays = begin_transfers(pieces, [flight.way for flight in flights])
    for flight, array in zip(flights, arrays, strict=True):
        flight.array = array
