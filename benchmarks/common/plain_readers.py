"""The rate at which plain readers of the storage directory get bytes into new memory of theirs.

An upper limit for a restore from storage: each process of a job needs its own copy.
"""

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

READERS = (2, 4)
_REPEATS = 3


def name_of(readers: int) -> str:
    """Return the name of the limit with so many readers."""
    return f"plain reads from storage, {readers} readers"


def measure(storage: Path, size_bytes: int) -> dict[str, float]:
    """Return GB/s (1e9 bytes) of all readers together, by name; each reads the same file.

    The median of a few repeats, after one that starts the readers. Each reader is a process and
    uses ``size_bytes`` of memory. OSError when the storage is full.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(dir=storage, prefix="eckpt-bench-") as file:
        np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8).tofile(file.name)
        rates: dict[str, float] = {}
        for readers in READERS:
            with ProcessPoolExecutor(readers, mp_context=context) as pool:
                seconds = [_seconds(pool, file.name, readers) for _ in range(1 + _REPEATS)][1:]
            rates[name_of(readers)] = readers * size_bytes / statistics.median(seconds) / 1e9
        return rates


def _seconds(pool: ProcessPoolExecutor, path: str, readers: int) -> float:
    start = time.perf_counter()
    read = list(pool.map(read_file, [path] * readers))
    assert len(set(read)) == 1, "all read the same file"
    return time.perf_counter() - start


def read_file(path: str) -> int:
    """Read a file into new memory; return its size in bytes."""
    with open(path, "rb", buffering=0) as file:
        data = memoryview(np.empty(Path(path).stat().st_size, np.uint8))
        size_bytes = data.nbytes
        while data.nbytes:
            count = file.readinto(data)
            if not count:
                raise OSError(f"{path} ended with {data.nbytes} bytes to come")
            data = data[count:]
    return size_bytes
