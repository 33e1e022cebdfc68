"""One snapshot on its way to the host: a bounded number of bytes at a time, read as they arrive.

The training thread makes it and waits until the state may be donated; one background thread reads
it. What lies between device and slot is the staging memory: transfers start when it has room.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.snapshot_plan import startable
from emergency_ckpt.errors import SaveFailed

Batch = list[tuple[int, npt.NDArray[Any]]]


@dataclasses.dataclass(slots=True)
class View:
    """Shard number ``position``, readable on the host already.

    ``waited_for``: the training thread waits until the reader has let go of it.
    """

    position: int
    view: npt.NDArray[Any]
    waited_for: bool = False


@dataclasses.dataclass(slots=True)
class Transfer:
    """Shard number ``position``, still on its device.

    Attributes:
      source: an array on one device.
      memory: the kind of host memory that it goes to; None where JAX's own transfer is used.
      waited_for: the training thread waits for its end; else ``source`` is a copy.
      let_go: called once when ``source`` is needed no more.
    """

    position: int
    source: jax.Array
    nbytes: int
    memory: str | None
    waited_for: bool
    let_go: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class HostShard:
    """One shard on the host. ``array``: what ``view`` shows, where that is a JAX array there."""

    view: npt.NDArray[Any]
    array: jax.Array | None


class Snapshot:
    """What one save reads; see the module. To be closed in any case; read once."""

    def __init__(
        self,
        views: Sequence[View],
        transfers: Sequence[Transfer] = (),
        staging_bytes: int | None = None,
    ) -> None:
        """``transfers`` start in their order, those that are waited for first.

        ``staging_bytes``: how much may lie on the host, not yet read; None for any amount. A
        larger shard goes alone.
        """
        self._views = deque(views)
        self._waiting = deque(transfers)
        self._started: deque[tuple[Transfer, jax.Array]] = deque()
        self._staging_bytes = staging_bytes
        self._in_use_bytes = 0
        self._shared = any(view.waited_for for view in views)
        self._lock = threading.Lock()
        self._closed = False
        self._may_wait_on = threading.Event()
        self._last: list[jax.Array] = []
        self._note_progress()

    @staticmethod
    def of_views(views: Sequence[npt.NDArray[Any]]) -> Snapshot:
        """A snapshot that is on the host already, in memory that nobody changes."""
        return Snapshot([View(position, view) for position, view in enumerate(views)])

    # For the training thread.

    def start_all(self) -> None:
        """Start every transfer now: the reader may not begin for long, or needs all at once.

        All of the snapshot is on the host then, whatever the staging memory; and the training
        thread waits for transfers only, never for the reader.
        """
        with self._lock:
            self._staging_bytes = None
            self._shared = False
            self._start()
            self._note_progress()

    def wait_captured(self, timeout_s: float) -> bool:
        """True once the state may be donated; False when that takes longer."""
        if not self._may_wait_on.wait(timeout_s):
            return False
        last, self._last = self._last, []
        try:
            jax.block_until_ready(last)
        except jax.errors.JaxRuntimeError:
            # The reader meets the same error, and reports it.
            return True
        return True

    # For the reader.

    def batches(self, limit_bytes: int) -> Iterator[Batch]:
        """All shards as (position, view), at most ``limit_bytes`` or one shard at a time.

        Views are valid until the next batch is asked for. Blocks for transfers.

        Raises:
          SaveFailed: the snapshot was closed before all was read.
          JaxRuntimeError: a transfer failed.
        """
        with self._lock:
            self._start()
        while self._views:
            batch: Batch = []
            size_bytes = 0
            while self._views and (
                not batch or size_bytes + self._views[0].view.nbytes <= limit_bytes
            ):
                view = self._views.popleft()
                size_bytes += view.view.nbytes
                batch.append((view.position, view.view))
                del view
            yield batch
            batch.clear()
        self._shared = False
        with self._lock:
            self._note_progress()
        if self._staging_bytes is not None:
            # So that what follows is transferred while a batch is read.
            limit_bytes = min(limit_bytes, self._staging_bytes // 2)
        yield from self._transferred(limit_bytes)
        if self._closed:
            raise SaveFailed("read", "snapshot", "it was given up before all was on the host")

    def _transferred(self, limit_bytes: int) -> Iterator[Batch]:
        while True:
            with self._lock:
                self._start()
                self._note_progress()
                if not self._started:
                    return
            batch: Batch = []
            size_bytes = 0
            while (found := self._next(limit_bytes - size_bytes, at_once=bool(batch))) is not None:
                transfer, host = found
                batch.append((transfer.position, _finish(transfer, host).view))
                size_bytes += transfer.nbytes
                del transfer, host, found
            yield batch
            batch.clear()
            self._in_use_bytes -= size_bytes

    def collect(self) -> list[HostShard]:
        """All shards at once, in order. As ``batches``; the views stay valid."""
        with self._lock:
            self._staging_bytes = None
            self._start()
            self._note_progress()
        found = {view.position: HostShard(view.view, None) for view in self._views}
        self._views.clear()
        while (started := self._next(0, at_once=False)) is not None:
            found[started[0].position] = _finish(*started)
        if self._closed:
            raise SaveFailed("read", "snapshot", "it was given up before all was on the host")
        return [found[position] for position in sorted(found)]

    def _next(self, room_bytes: int, *, at_once: bool) -> tuple[Transfer, jax.Array] | None:
        """The next transfer; ``at_once``: only one that has ended, of at most ``room_bytes``."""
        with self._lock:
            if not self._started:
                return None
            transfer, host = self._started[0]
            if at_once and (transfer.nbytes > room_bytes or not _has_ended(host)):
                return None
            return self._started.popleft()

    def close(self) -> None:
        """Let go of all that was not read: whoever reads on gets an error. Idempotent."""
        with self._lock:
            self._closed = self._closed or bool(self._views or self._waiting or self._started)
            for transfer in [*self._waiting, *(transfer for transfer, _ in self._started)]:
                transfer.let_go()
            self._waiting.clear()
            self._started.clear()
            self._views.clear()
            self._last.clear()
            self._may_wait_on.set()

    # With the lock.

    def _start(self) -> None:
        """Start as many transfers as staging memory has room for, in one call."""
        count = len(self._waiting)
        if self._staging_bytes is not None:
            sizes = (transfer.nbytes for transfer in self._waiting)
            count = startable(sizes, self._in_use_bytes, self._staging_bytes)
        now = [self._waiting.popleft() for _ in range(count)]
        pinned = [(each.source, each.memory) for each in now if each.memory is not None]
        hosts = iter(
            jax.device_put(
                [source for source, _ in pinned],
                [source.sharding.with_memory_kind(memory) for source, memory in pinned],
                # Not even what lies in host memory already: the next step may write there.
                may_alias=False,
            )
        )
        for transfer in now:
            if transfer.memory is None:
                transfer.source.copy_to_host_async()
            host = transfer.source if transfer.memory is None else next(hosts)
            self._started.append((transfer, host))
            self._in_use_bytes += transfer.nbytes

    def _note_progress(self) -> None:
        """Once nothing more has to start that is waited for, the end of what did is the end."""
        waits = self._waiting and self._waiting[0].waited_for
        if self._may_wait_on.is_set() or self._shared or waits:
            return
        self._last = [host for transfer, host in self._started if transfer.waited_for]
        self._may_wait_on.set()


def _has_ended(host: Any) -> bool:
    return host.is_ready()  # public, but not in JAX's type of arrays


def _finish(transfer: Transfer, host: jax.Array) -> HostShard:
    view = np.asarray(jax.block_until_ready(host))
    transfer.let_go()
    return HostShard(view, None if transfer.memory is None else host)
