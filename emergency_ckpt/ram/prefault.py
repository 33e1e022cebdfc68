"""Background work on slots: reserve them, make their pages, map them for the devices' DMA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

from absl import logging

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError, MappingRefused
from emergency_ckpt.state.mapped import MappedMemory

_PIECE_BYTES = 64 << 20
_ENDED = object()


class SlotMemory(NamedTuple):
    """The memory of a slot. ``written``: its pages were written before this process opened it."""

    mapping: Mapping
    mapped: MappedMemory
    written: bool


class Prefaulter:
    """Runs requests in one thread, which it starts when there are any. Thread-safe.

    Args:
      reserve: reserves the slots; its argument is their size in bytes.
      memories: returns the memory of all slots, or of the newest only when its argument is True,
        in the order in which it is needed.
      on_refused: told once why memory cannot be mapped, and what to raise.
    """

    def __init__(
        self,
        name: str,
        reserve: Callable[[int], None],
        memories: Callable[[bool], Sequence[SlotMemory]],
        on_refused: Callable[[str], None],
        threads: int,
    ) -> None:
        self._name = name
        self._reserve = reserve
        self._memories = memories
        self._on_refused = on_refused
        self._threads = threads
        self._maps = True
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: list[tuple[int | None, bool]] = []  # requests not yet begun
        self._first: list[SlotMemory] = []

    def ask(self, reserve_bytes: int | None, *, newest_only: bool = False) -> None:
        """Touch all pages, or those of the newest slot, and map them. Does not block.

        With ``reserve_bytes`` after ``reserve(reserve_bytes)``. A request during another one is
        done next. A failure is logged.
        """
        with self._lock:
            self._asked.append((reserve_bytes, newest_only))
            try:
                self._start()
            except RuntimeError as error:  # the next thread that starts takes the request
                self._warn(error)

    def ask_first(self, memories: Iterable[SlotMemory]) -> None:
        """Touch and map this memory before any other: somebody may wait for it. Does not block.

        Where no thread can be started, the mapping is given up, and all goes on without it.
        """
        missing = [memory for memory in memories if memory.mapped.missing]
        with self._lock:
            if missing and self._maps and not self._is_ending:
                self._first = [*missing, *self._first]
                try:
                    self._start()
                except RuntimeError as error:  # the process may have no more threads
                    self._warn(error)
                    missing, self._first = self._first, []
                else:
                    return
        self._give_up(missing)

    def close(self, timeout_s: float) -> None:
        """End the thread. Blocks for at most ``timeout_s`` seconds."""
        self._closing.set()
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon thread inside native code aborts the process at interpreter exit.
            thread = threading.Thread(None, self._run, "eckpt-prefault")
            thread.start()
            self._thread = thread  # ``close`` cannot wait for one that was not started

    @property
    def _is_ending(self) -> bool:
        return self._closing.is_set() or not threading.main_thread().is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                asked, self._asked = self._asked, []
                if self._is_ending or not (asked or self._first):
                    memories, self._first, self._thread = self._first, [], None
                    break
            self._work(self._memories_of(asked) if asked else [])
        self._give_up(memories)

    def _memories_of(self, asked: Sequence[tuple[int | None, bool]]) -> Sequence[SlotMemory]:
        size_bytes = max((size for size, _ in asked if size is not None), default=None)
        try:
            if size_bytes is not None:
                self._reserve(size_bytes)
        except (OSError, LocalTierError) as error:
            self._warn(error)
            return []
        return self._memories(all(only for _, only in asked))

    def _work(self, memories: Sequence[SlotMemory]) -> None:
        """Work on this memory in small steps, between which other memory may go first."""
        waiting = {memory: self._steps(memory) for memory in memories}
        try:
            while not self._is_ending:
                with self._lock:
                    first, self._first = self._first, []
                ahead = {
                    memory: waiting.pop(memory, None) or self._steps(memory) for memory in first
                }
                waiting = {**ahead, **waiting}
                if not self._maps:
                    self._give_up(waiting)
                if not waiting:
                    return
                memory, steps = next(iter(waiting.items()))
                try:
                    if next(steps, _ENDED) is _ENDED:
                        del waiting[memory]
                except (OSError, ValueError, LocalTierError) as error:
                    # ValueError: the slot was removed meanwhile.
                    self._warn(error)
                    self._give_up([memory])
                    del waiting[memory]
        finally:
            self._give_up(waiting)

    def _steps(self, memory: SlotMemory) -> Generator[None]:
        mapping, mapped, written = memory
        missing = mapped.missing
        for begin, nbytes in missing or [(0, mapping.size_bytes)]:
            for offset in range(begin, begin + nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, begin + nbytes - offset)
                _native.prefault(mapping, offset, size, self._threads, written=written)
                yield
            if missing and self._maps:
                try:
                    mapped.map(begin, nbytes)
                except MappingRefused as error:
                    self._maps = False
                    self._on_refused(str(error))
                yield

    def _give_up(self, memories: Iterable[SlotMemory]) -> None:
        for memory in memories:
            memory.mapped.give_up()

    def _warn(self, error: Exception) -> None:
        logging.warning("prefault of %s: %s; saves and restores are slower", self._name, error)
