"""What pages of a ramdisk cost: ``python benchmarks/pages.py --ramdisk /mnt/large``.

Seconds for each GiB, of one thread: to make pages, to map them, and to use them again. Beside
another mount it tells what large pages are worth on this machine.
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

import limits
import machine
import numpy as np
from arguments import positive
from report import markdown, number

_PIECE_BYTES = 256 * 2**10
_GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", type=positive, default=1024, help="size of the file")
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args(arguments)
    size_bytes = options.mib * 2**20
    try:
        machine.require_room(options.ramdisk, size_bytes, 2 * size_bytes)
        rounds = [measure(options.ramdisk, size_bytes) for _ in range(options.rounds)]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = [
        [name, *(number(pick([found[name] for found in rounds])) for pick in _PICKS)]
        for name in rounds[0]
    ]
    print(f"{options.ramdisk}, {options.mib} MiB, {options.rounds} rounds\n")
    print(markdown([["s for each GiB", "median", "least", "most"], *rows]))
    return 0


_PICKS: tuple[Callable[[list[float]], float], ...] = (statistics.median, min, max)


def measure(ramdisk: Path, size_bytes: int) -> dict[str, float]:
    """Seconds for each GiB by what is done. OSError when the ramdisk is full."""
    source = np.ones(size_bytes, np.uint8)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        found[name] = (time.perf_counter() - start) / size_bytes * _GIB

    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        fd = file.fileno()
        os.ftruncate(fd, size_bytes)
        timed("write into a new file", lambda: _write(fd, source))
        timed("write into it again", lambda: _write(fd, source))
        timed("CRC32C, mapped just now", lambda: limits.first_crc(fd, size_bytes, 1))
    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        fd = file.fileno()
        # The length first: a file system may take large pages only within it.
        os.ftruncate(fd, size_bytes)
        timed("reserve a new file", lambda: os.posix_fallocate(fd, 0, size_bytes))
        mapped = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
        timed("copy into it, mapped just now", lambda: np.copyto(mapped, source))
        timed("copy into it again", lambda: np.copyto(mapped, source))
    return found


def _write(fd: int, source: np.ndarray) -> None:
    for start in range(0, len(source), _PIECE_BYTES):
        piece = source[start : start + _PIECE_BYTES]
        written = os.pwrite(fd, piece.data, start)
        assert written == len(piece), "a ramdisk writes all or fails"


if __name__ == "__main__":
    sys.exit(main())
