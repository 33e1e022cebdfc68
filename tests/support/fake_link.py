"""A machine whose devices have a DMA of their own, with the faults of one.

No accelerator is needed: the arrays are on CPU, whose buffers have addresses too, so all of the
library but the driver's own calls runs as on an accelerator. It checks what a driver answers with a
crash: a copy into memory that is not mapped, a range that is mapped twice, memory that is unmapped
under a copy.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy.typing as npt

from emergency_ckpt.errors import MappingRefused, SaveFailed
from emergency_ckpt.state.link import Link, probe


class FakeCopy:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    @property
    def has_ended(self) -> bool:
        return self._future.done()

    def wait(self) -> int:
        return self._future.result()


class FakeMachine:
    """Maps memory and copies from devices, each by one thread. Its attributes are its faults.

    Attributes:
      limit_bytes: that may be mapped at once; None for no limit.
      short_bytes: by which each copy falls short of what was asked for, and says so.
      silent: such a copy says that all was copied.
      lost: ids of devices whose copies fail.
      gate: copies wait for it before they move a byte.
      map_gate: mapping waits for it.
      unmap_gate: unmapping waits for it, once ``is_unmapping``.
      on_unmap: called before each unmapping.
      mapped: address and size of each mapped range.
      copied: bytes that each device has sent.
      most_in_flight: the most bytes whose copies had begun and not ended.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.short_bytes = 0
        self.silent = False
        self.lost: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.map_gate = threading.Event()
        self.map_gate.set()
        self.unmap_gate = threading.Event()
        self.unmap_gate.set()
        self.is_unmapping = threading.Event()
        self.on_unmap: Callable[[], object] = bool
        self.mapped: dict[int, int] = {}
        self.copied: Counter[int] = Counter()
        self.most_in_flight = 0
        self._targets: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._engines: dict[int, ThreadPoolExecutor] = {}

    def link(self) -> Link:
        """Return the link that a probe of this machine finds."""
        return probe(jax.local_devices(), self, self)

    def has_mapped(self, memory: npt.NDArray[Any]) -> bool:
        """Return whether one mapped range has all of this memory."""
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        with self._lock:
            return any(at <= begin and end <= at + size for at, size in self.mapped.items())

    # Mapper.

    def map(self, address: int, nbytes: int) -> None:
        self.map_gate.wait()
        with self._lock:
            for begin, size in self.mapped.items():
                assert address + nbytes <= begin or begin + size <= address, "mapped twice"
            limit = self.limit_bytes
            if limit is not None and sum(self.mapped.values()) + nbytes > limit:
                raise MappingRefused("map", f"{nbytes} bytes", "the fake limit is reached")
            self.mapped[address] = nbytes

    def unmap(self, address: int) -> None:
        self.on_unmap()
        self.is_unmapping.set()
        self.unmap_gate.wait()
        with self._lock:
            begin, end = address, address + self.mapped[address]
            for target, size in self._targets:
                assert target + size <= begin or end <= target, "unmapped under a copy"
            del self.mapped[address]

    # Dma.

    def copy(self, source: jax.Array, offset: int, target: int, nbytes: int) -> FakeCopy:
        (device,) = source.devices()
        with self._lock:
            assert any(
                begin <= target and target + nbytes <= begin + size
                for begin, size in self.mapped.items()
            ), "a copy into memory that is not mapped"
            self._targets.append((target, nbytes))
            self.most_in_flight = max(self.most_in_flight, sum(n for _, n in self._targets))
            engine = self._engines.setdefault(device.id, ThreadPoolExecutor(1, "fake-dma"))
        address = source.unsafe_buffer_pointer() + offset

        def move() -> int:
            try:
                self.gate.wait()
                if device.id in self.lost:
                    raise SaveFailed("read", f"device {device}", "it was lost")
                moved = nbytes - min(nbytes, self.short_bytes)
                ctypes.memmove(target, address, moved)
                self.copied[device.id] += moved
                return nbytes if self.silent else moved
            finally:
                with self._lock:
                    self._targets.remove((target, nbytes))

        return FakeCopy(engine.submit(move))
