"""Cost of ramdisk pages: ``python -m benchmarks.micro.pages --ramdisk /mnt/large``.

Prints the seconds per GiB of one thread for making pages, mapping them, and using them again.
Compared with another mount, this shows the benefit of large pages on this machine.
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common import limits, machine
from benchmarks.common.arguments import above_0, positive
from benchmarks.common.tables import markdown, number

_PIECE_BYTES = 256 * 2**10
_GIB = 2**30
_MEMORY = {"memory": mmap.MADV_NOHUGEPAGE, "memory of large pages": mmap.MADV_HUGEPAGE}
"""Private memory, outside the ramdisk, into which a process could receive fetched bytes first."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", type=positive, default=1024, help="size of the file")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--idle-s", type=above_0, default=0.0,
        help="pause before pages are made, for a host to take back this machine's free memory",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    size_bytes = options.mib * 2**20
    try:
        machine.require_room(options.ramdisk, size_bytes, 2 * size_bytes)
        rounds = [
            measure(options.ramdisk, size_bytes, options.idle_s) for _ in range(options.rounds)
        ]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = [
        [name, *(number(pick([found[name] for found in rounds])) for pick in _PICKS)]
        for name in rounds[0]
    ]
    idle = f", {options.idle_s:g} s idle before pages are made" if options.idle_s else ""
    print(f"{options.ramdisk}, {options.mib} MiB, {options.rounds} rounds{idle}\n")
    print(markdown([["s for each GiB", "median", "least", "most"], *rows]))
    return 0


_PICKS: tuple[Callable[[list[float]], float], ...] = (statistics.median, min, max)


class _Timer:
    def __init__(self, size_bytes: int, idle_s: float) -> None:
        self.found: dict[str, float] = {}
        self._size_bytes = size_bytes
        self._idle_s = idle_s

    def run(self, name: str, work: Callable[[], object], *, makes_pages: bool = False) -> None:
        if makes_pages:
            time.sleep(self._idle_s)
        start = time.perf_counter()
        work()
        self.found[name] = (time.perf_counter() - start) / self._size_bytes * _GIB


def measure(ramdisk: Path, size_bytes: int, idle_s: float = 0.0) -> dict[str, float]:
    """Return the seconds per GiB by operation. OSError when the ramdisk is full."""
    source = np.ones(size_bytes, np.uint8)
    timer = _Timer(size_bytes, idle_s)
    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        _written(timer, file.fileno(), source)
    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        _mapped(timer, file.fileno(), source)
    for name, advice in _MEMORY.items():
        _private(timer, name, advice, source)
    return timer.found


def _written(timer: _Timer, fd: int, source: np.ndarray) -> None:
    os.ftruncate(fd, len(source))
    timer.run("write into a new file", lambda: _write(fd, source), makes_pages=True)
    timer.run("write into it again", lambda: _write(fd, source))
    timer.run("CRC32C, mapped just now", lambda: limits.first_crc(fd, len(source), 1))


def _mapped(timer: _Timer, fd: int, source: np.ndarray) -> None:
    # The length first: a file system may take large pages only within it.
    os.ftruncate(fd, len(source))
    timer.run(
        "reserve a new file", lambda: os.posix_fallocate(fd, 0, len(source)), makes_pages=True
    )
    target = np.frombuffer(mmap.mmap(fd, len(source)), np.uint8)
    timer.run("copy into it, mapped just now", lambda: np.copyto(target, source))
    timer.run("copy into it again", lambda: np.copyto(target, source))


def _private(timer: _Timer, name: str, advice: int, source: np.ndarray) -> None:
    memory = mmap.mmap(-1, len(source), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    target = np.frombuffer(memory, np.uint8)
    timer.run(f"copy into new {name}", lambda: np.copyto(target, source), makes_pages=True)


def _write(fd: int, source: np.ndarray) -> None:
    for start in range(0, len(source), _PIECE_BYTES):
        piece = source[start : start + _PIECE_BYTES]
        written = os.pwrite(fd, piece.data, start)
        assert written == len(piece), "a ramdisk writes all or fails"


if __name__ == "__main__":
    sys.exit(main())
