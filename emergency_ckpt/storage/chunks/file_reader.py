"""Reads of stretches of files into a place that takes bytes, with a CRC32C of each box.

Each thread reads into a small buffer of its own, which stays in its core's cache until its bytes
are in their place. A thread that waits for a file system after the deadline is left behind: what it
reads is taken by nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from emergency_ckpt import _native
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.storage.calls import NOT_IN_TIME
from emergency_ckpt.storage.chunks.index import Stretch
from emergency_ckpt.work_progress import WorkProgress

_PIECE_BYTES = 512 << 10
_OPEN_FILES = 64


class Sink(Protocol):
    """A place that takes bytes. Thread-safe."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``. Raises when the place was closed, or has no room."""
        ...


class FileBox(NamedTuple):
    """The bytes of a box in their order, and the offset at which they go into the sink."""

    parts: Sequence[bytes | Stretch]
    offset: int


class _Piece(NamedTuple):
    box: int
    part: bytes | Stretch
    nbytes: int
    into: int


def read_into(
    boxes: Sequence[FileBox], sink: Sink, *, threads: int, progress: WorkProgress
) -> list[int]:
    """Read all boxes; return the CRC32C of the bytes of each as they were read. Blocks.

    Raises:
      OSError: a file is missing or cannot be read.
      CorruptData: a file is shorter than it should be.
      DeadlineExceeded: nothing moves any more.
      Anything that ``sink`` raises.
    """
    reading = _Reading(_cut(boxes), sink, progress)
    for number in range(min(threads, len(reading.pieces))):
        name = f"eckpt-read-{number}"
        threading.Thread(target=reading.work, name=name, daemon=True).start()
    crcs = reading.wait()
    found = [0] * len(boxes)
    for piece, crc in zip(reading.pieces, crcs, strict=True):
        found[piece.box] = _native.crc32c_combine(found[piece.box], crc, piece.nbytes)
    return found


def _cut(boxes: Sequence[FileBox]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for number, box in enumerate(boxes):
        into = box.offset
        for part in box.parts:
            if isinstance(part, bytes):
                pieces.append(_Piece(number, part, len(part), into))
                into += len(part)
                continue
            file, offset, nbytes = part
            for at in range(0, nbytes, _PIECE_BYTES):
                piece = Stretch(file, offset + at, min(_PIECE_BYTES, nbytes - at))
                pieces.append(_Piece(number, piece, piece.nbytes, into + at))
            into += nbytes
    return pieces


class _Reading:
    """The state that the threads of one ``read_into`` share."""

    def __init__(self, pieces: list[_Piece], sink: Sink, progress: WorkProgress) -> None:
        self.pieces = pieces
        self._progress = progress
        self._sink = sink
        self._crcs: list[int] = [0] * len(pieces)
        self._changed = threading.Condition()
        self._next = 0
        self._done = 0
        self._error: BaseException | None = None
        self._is_cancelled = False

    def wait(self) -> list[int]:
        """Return the CRC32C of each piece when all are read; else raise, and begin no more."""
        with self._changed:
            try:
                while self._error is None and self._done < len(self.pieces):
                    is_told = self._changed.wait(self._progress.left_s)
                    if not is_told and time.monotonic() >= self._progress.deadline_s:
                        raise self._progress.error("read", "files of a step", NOT_IN_TIME)
            finally:
                self._is_cancelled = True
            if self._error is not None:
                raise self._error
            return self._crcs

    def work(self) -> None:
        """Read pieces until none is left. Runs in threads of its own."""
        files = _Files()
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            while (number := self._take()) is not None:
                piece = self.pieces[number]
                data = buffer[: piece.nbytes]
                if isinstance(piece.part, Stretch):
                    files.read(piece.part, data)
                else:
                    data[:] = piece.part
                if self._is_cancelled:
                    return
                crc = _native.crc32c(data)
                self._sink.write(data, piece.into)
                self._progress.add(piece.nbytes)
                self._put(number, crc)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            files.close()

    def _take(self) -> int | None:
        with self._changed:
            if self._is_cancelled or self._error is not None or self._next == len(self.pieces):
                return None
            self._next += 1
            return self._next - 1

    def _put(self, number: int, crc: int) -> None:
        with self._changed:
            self._crcs[number] = crc
            self._done += 1
            if self._done == len(self.pieces):
                self._changed.notify_all()


class _Files:
    """The open files of one thread, which alone closes them: it may be reading one for long."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, part: Stretch, into: memoryview) -> None:
        fd = self._open.get(part.file)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[part.file] = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < part.nbytes:
            count = os.preadv(fd, [into[done:]], part.offset + done)
            if count == 0:
                expected = f"at least {part.offset + part.nbytes} bytes"
                raise CorruptData("read", part.file, "it is too short", expected=expected)
            done += count

    def close(self) -> None:
        for fd in self._open.values():
            with suppress(OSError):
                os.close(fd)
        self._open.clear()
