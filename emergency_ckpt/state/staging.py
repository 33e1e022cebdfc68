"""One snapshot on its way to the host: a bounded number of bytes at a time, read as they arrive.

The training thread makes it and waits until the state may be donated; one background thread reads
it. Bytes between device and slot are in staging memory; transfers start when that has room.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.save.snapshot_plan import startable
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.types import Box, LeafSpec

Inspect = Callable[[], None]
"""Called at intervals during a wait; an error that it raises ends the wait."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
_FIRST_INSPECTION_S = 1.0
_BETWEEN_INSPECTIONS_S = 0.25


def wait_until_ready(arrays: Iterable[Any], inspect: Inspect) -> float:
    """Wait until all ``arrays`` have been computed, or have failed: who reads them is told.

    Returns the seconds that it took.

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
    """Return whether the computation of ``array`` has ended: who reads it does not wait."""
    # Of a deleted array ``is_ready`` may end the process; who reads it gets an error.
    return array.is_deleted() or array.is_ready()


def inspect_nothing() -> None:
    """Look at nothing: the wait has no other end than its arrays."""


Memory = memoryview | npt.NDArray[Any]
"""Elements of a shard on the host, in their shape; contiguous or not."""

Batch = list[tuple[int, Memory]]


def flat_bytes(view: Memory) -> Memory:
    """Return contiguous bytes; extension types have no buffer interface of their own."""
    if type(view) is memoryview and view.c_contiguous:
        return view
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """Shard number ``position`` on its way from its device.

    Attributes:
      source: an array on one device.
      memory: kind of the target host memory; None where JAX's own transfer is used.
      waited_for: the training thread waits for its end; otherwise ``source`` is a copy.
      release: called once when ``source`` is no longer needed.
      target: from the start on; the source where JAX's own transfer is used.
    """

    position: int
    source: jax.Array
    nbytes: int
    memory: str | None
    waited_for: bool
    release: Callable[[], None]
    # Any: ``is_ready`` is public but missing in JAX's array type.
    target: Any = dataclasses.field(default=None, init=False)
    _view: npt.NDArray[Any] | None = dataclasses.field(default=None, init=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    @property
    def has_ended(self) -> bool:
        """Return whether the bytes are on the host; after the start."""
        return self.target.is_ready()

    def land(self) -> npt.NDArray[Any]:
        """Return the bytes on the host; blocks for them. The source may be released afterwards.

        Called from both threads, because a source that was donated meanwhile cannot be read again.
        """
        with self._lock:
            if self._view is None:
                with jax.transfer_guard("allow"):
                    self._view = np.asarray(jax.block_until_ready(self.target))
            return self._view


@dataclasses.dataclass(frozen=True, slots=True)
class HostShard:
    """One shard in host memory that is kept until it is written, with the CRC32C of its bytes.

    ``non_finite``: number of its values that are NaN or infinite; 0 where nobody counts them.
    """

    view: npt.NDArray[Any]
    crc32c: int
    non_finite: int = 0

    @staticmethod
    def of_bytes(
        memory: npt.NDArray[np.uint8], spec: LeafSpec, box: Box, crc32c: int, non_finite: int = 0
    ) -> HostShard:
        """Return the shard ``box`` of the leaf ``spec`` whose bytes are ``memory``, not copied."""
        view = memory.view(dtype_named(spec.dtype)).reshape(shape_of(box))
        return HostShard(view, crc32c, non_finite)


class Snapshot:
    """The shards that one save reads; see the module. Always to be closed; read once."""

    def __init__(
        self,
        views: Iterable[tuple[int, Memory]],
        transfers: Sequence[Transfer] = (),
        staging_bytes: int | None = None,
        *,
        waits_for_views: bool = False,
        ready_s: float = 0.0,
    ) -> None:
        """``transfers`` start in their order, those with ``waited_for`` first.

        Args:
          views: shards by position that are readable on the host already.
          staging_bytes: maximum of unread bytes on the host; None for unlimited. A larger shard is
            transferred alone.
          waits_for_views: the training thread waits until the reader has released them.
          ready_s: seconds that the training thread has waited for arrays still being computed.
        """
        self.ready_s = ready_s
        self._sources = [each.source for each in transfers if each.waited_for]
        self._views = deque(views)
        self._waiting = deque(transfers)
        self._started: deque[Transfer] = deque()
        self._waited_for: dict[int, Transfer] = {}  # started ones, by position
        self._staging_bytes = staging_bytes
        self._in_use_bytes = 0
        self._shared = waits_for_views
        self._lock = threading.Lock()
        self._closed = False
        self._failure: Exception | None = None
        self._nothing_to_start = threading.Event()  # among those waited for
        self._note_progress()

    @staticmethod
    def of_views(views: Sequence[npt.NDArray[Any]]) -> Snapshot:
        """Return a snapshot of host memory that does not change."""
        return Snapshot(enumerate(views))

    # Before reading.

    def start(self, *, everything: bool = False) -> None:
        """Start the transfers that staging memory has room for. Does not block; never raises.

        ``everything``: start all, because the reader must wait for others first, or needs all at
        once. The whole snapshot then comes to the host, whatever the staging memory, and the
        training thread waits for transfers only, not for the reader.
        """
        with self._lock:
            if everything:
                self._staging_bytes = None
                self._shared = False
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 - the reader raises it
                self._failure = error
                self._nothing_to_start.set()
            self._note_progress()

    def wait_captured(self, timeout_s: float, inspect: Inspect = inspect_nothing) -> bool:
        """Wait until the state may be donated; return False after ``timeout_s``.

        The deadline bounds the wait for the reader. Transfers in progress have none, because a
        device that does not answer also stops the next step; an error of ``inspect`` ends the wait.
        ``ready_s`` grows by the time until the devices have computed what is transferred.
        """
        self.ready_s += wait_until_ready(self._sources, inspect)
        self._sources = []
        if not self._nothing_to_start.wait(timeout_s):
            return False
        with self._lock:
            transfers = list(self._waited_for.values())
        # Of the others the target is the source.
        pinned = [each.target for each in transfers if each.memory is not None]
        wait_until_ready(pinned, inspect)
        try:
            jax.block_until_ready(pinned)
            for transfer in transfers:
                if transfer.memory is None:
                    transfer.land()
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._failure = error
        return True

    # Called by the reader.

    def batches(self, limit_bytes: int) -> Iterator[Batch]:
        """Yield all shards as (position, view), at most ``limit_bytes`` or one shard at a time.

        Views are valid until the next batch is requested. Blocks for transfers.

        Raises:
          SaveFailed: the snapshot was closed before all was read.
          Exception: the error of a failed transfer, in either thread.
        """
        with self._lock:
            self._start()
        while batch := self._next_views(limit_bytes):
            yield batch
            batch.clear()
        self._shared = False
        if self._staging_bytes is not None:
            # So that the next shards are transferred while a batch is read.
            limit_bytes = min(limit_bytes, self._staging_bytes // 2)
        read_bytes = 0
        while self._go_on(read_bytes):
            batch = []
            read_bytes = 0
            while (moved := self._next(limit_bytes - read_bytes, at_once=bool(batch))) is not None:
                batch.append((moved.position, self._land(moved)))
                read_bytes += moved.nbytes
                del moved
            yield batch
            batch.clear()
        self._check_open()

    def close(self) -> None:
        """Release all unread shards; further reads raise an error. Idempotent."""
        with self._lock:
            self._closed = self._closed or bool(self._views or self._waiting or self._started)
            for transfer in [*self._waiting, *self._started]:
                transfer.release()
            self._waiting.clear()
            self._started.clear()
            self._waited_for.clear()
            self._views.clear()
            self._sources = []
            self._nothing_to_start.set()

    def _next_views(self, limit_bytes: int) -> Batch:
        batch: Batch = []
        size_bytes = 0
        with self._lock:
            while self._views:
                size_bytes += self._views[0][1].nbytes
                if batch and size_bytes > limit_bytes:
                    break
                batch.append(self._views.popleft())
        return batch

    def _go_on(self, read_bytes: int) -> bool:
        """Free ``read_bytes`` of staging memory and start more; return False when none is left."""
        with self._lock:
            self._in_use_bytes -= read_bytes
            self._start()
            self._note_progress()
            return bool(self._started)

    def _next(self, room_bytes: int, *, at_once: bool) -> Transfer | None:
        """Return the next transfer; ``at_once``: only a finished one, of at most ``room_bytes``."""
        with self._lock:
            if not self._started:
                return None
            first = self._started[0]
            if at_once and (first.nbytes > room_bytes or not first.has_ended):
                return None
            return self._started.popleft()

    def _land(self, transfer: Transfer) -> npt.NDArray[Any]:
        try:
            view = transfer.land()
        finally:
            transfer.release()
        with self._lock:
            self._waited_for.pop(transfer.position, None)
        return view

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise SaveFailed("read", "snapshot", "it was closed before all was on the host")

    # Called with the lock held.

    def _start(self) -> None:
        """Start as many transfers as staging memory has room for, in one call."""
        count = len(self._waiting)
        if self._staging_bytes is not None:
            sizes = (transfer.nbytes for transfer in self._waiting)
            count = startable(sizes, self._in_use_bytes, self._staging_bytes)
        if not count or self._failure is not None:
            return
        for started in _start_together(itertools.islice(self._waiting, count)):
            self._waiting.popleft()
            self._started.append(started)
            self._in_use_bytes += started.nbytes
            if started.waited_for:
                self._waited_for[started.position] = started

    def _note_progress(self) -> None:
        """Record that the awaited transfers have ended, once none of them is left to start."""
        if not self._shared and not (self._waiting and self._waiting[0].waited_for):
            self._nothing_to_start.set()


def _start_together(transfers: Iterable[Transfer]) -> list[Transfer]:
    now = list(transfers)
    to_memory = [(each.source, each.memory) for each in now if each.memory is not None]
    with jax.transfer_guard("allow"):
        hosts = iter(
            jax.device_put(
                [source for source, _ in to_memory],
                [source.sharding.with_memory_kind(memory) for source, memory in to_memory],
                # Not even for values in host memory already, since the next step may write there.
                may_alias=False,
            )
        )
        for each in now:
            if each.memory is None:
                each.source.copy_to_host_async()
            each.target = each.source if each.memory is None else next(hosts)
    return now
