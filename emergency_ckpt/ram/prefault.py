"""Background work on slots: reserve them, make their pages, map them for the devices' DMA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from absl import logging

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError

_PIECE_BYTES = 64 << 20


class Prefaulter:
    """Runs requests in one thread, which it starts when there are any. Thread-safe.

    Args:
      reserve: reserves the slots; its argument is their size in bytes.
      map_slots: maps the slots for the devices, once their pages are there.
      mappings: returns the memory of all slots, or of the newest only when its argument is True,
        and whether its pages were written before.
    """

    def __init__(
        self,
        name: str,
        reserve: Callable[[int], None],
        mappings: Callable[[bool], Sequence[tuple[Mapping, bool]]],
        map_slots: Callable[[], None],
        threads: int,
    ) -> None:
        self._name = name
        self._reserve = reserve
        self._mappings = mappings
        self._map_slots = map_slots
        self._threads = threads
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: list[tuple[int | None, bool]] = []  # requests not yet begun

    def ask(self, reserve_bytes: int | None, *, newest_only: bool = False) -> None:
        """Touch all pages, or those of the newest slot. Does not block.

        With ``reserve_bytes`` after ``reserve(reserve_bytes)``. A request during another one is
        done next. Changes no byte. A failure is logged, and the next save reports it.
        """
        with self._lock:
            self._asked.append((reserve_bytes, newest_only))
            if self._thread is None or not self._thread.is_alive():
                # A daemon thread inside native code aborts the process at interpreter exit.
                self._thread = threading.Thread(None, self._run, "eckpt-prefault")
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread. Blocks for at most ``timeout_s`` seconds."""
        self._closing.set()
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._thread = None
                    return
                asked, self._asked = self._asked, []
            size_bytes = max((size for size, _ in asked if size is not None), default=None)
            self._prefault(size_bytes, newest_only=all(only for _, only in asked))

    def _prefault(self, reserve_bytes: int | None, *, newest_only: bool) -> None:
        try:
            if reserve_bytes is not None:
                self._reserve(reserve_bytes)
            for mapping, written in self._mappings(newest_only):
                for offset in range(0, mapping.size_bytes, _PIECE_BYTES):
                    if self._closing.is_set() or not threading.main_thread().is_alive():
                        return
                    nbytes = min(_PIECE_BYTES, mapping.size_bytes - offset)
                    _native.prefault(mapping, offset, nbytes, self._threads, written=written)
            self._map_slots()
        except (OSError, ValueError, LocalTierError) as error:
            # ValueError: the slot was removed meanwhile.
            logging.warning("prefault of %s: %s; saves and restores are slower", self._name, error)
