"""The files of one writer: opened, appended to, and followed by the next when full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from pathlib import Path

FILES_KEPT = 4
"""Files of one writer; together they hold its limit of bytes."""

_MAX_TWINS = 8
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})


class LogFiles:
    """Appends whole lines to ``<directory>/<stem>.jsonl``. For one thread; OSError on failure.

    A failed call leaves the file closed; the next one opens it again, makes a missing directory,
    and ends a line that was cut short.
    """

    def __init__(self, directory: Path, stem: str, limit_bytes: int) -> None:
        self._directory = directory
        self._stem = stem
        self._file_bytes = max(1, limit_bytes // FILES_KEPT)
        self._descriptor: int | None = None
        self._path = directory / f"{stem}.jsonl"
        self._size_bytes = 0

    def append(self, lines: bytes) -> None:
        """Write ``lines``, which end with a line end, to the file, or to the next one if full."""
        try:
            if self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0:
                self._open()
            if self._size_bytes and self._size_bytes + len(lines) > self._file_bytes:
                self._rotate()
            self._write(lines)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> None:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MAX_TWINS + 1):
            name = self._stem if number == 1 else f"{self._stem}-{number}"
            self._path = self._directory / f"{name}.jsonl"
            self._descriptor = descriptor = _locked(self._path)
            if descriptor is not None:
                break
        else:
            raise OSError(errno.EBUSY, f"{_MAX_TWINS} programs write there", str(self._path))
        self._size_bytes = os.fstat(descriptor).st_size
        if self._size_bytes and os.pread(descriptor, 1, self._size_bytes - 1) != b"\n":
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None, "the caller has opened it"
        left = memoryview(data)
        while left:
            count = os.write(self._descriptor, left)
            self._size_bytes += count
            left = left[count:]

    def _rotate(self) -> None:
        stem = self._path.name.removesuffix(".jsonl")
        names = [self._path, *(self._directory / f"{stem}.{n}.jsonl" for n in range(1, FILES_KEPT))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        self._open()


def _locked(path: Path) -> int | None:
    """Return a descriptor of the file, created if missing; None when another program writes it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EEXIST, "not a regular file", str(path))
        if _lock(descriptor) and _is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in _NO_LOCKS  # a file system without locks: one writer is assumed
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return False where another program has moved the file away since it was opened."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
