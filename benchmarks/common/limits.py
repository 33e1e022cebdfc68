"""Rates of the machine itself, measured in the same run: upper limits for every checkpointer."""

import contextlib
import mmap
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from emergency_ckpt import _native

_STREAMS = _WRITERS = (1, 2, 4)
_READERS = (2, 4)
_REPEATS = 3
_SOCKET_PIECE_BYTES = 4 * 2**20
_KEPT_PIECE_BYTES = 256 * 2**10  # stays in the cache until it is written
_NETWORK_TIMEOUT_S = 60.0

COPY_WITH_CRC = "copy with CRC32C into a mapped ramdisk file"
LOOPBACK = "loopback TCP"
FIRST_CRC = "CRC32C of a ramdisk file mapped anew"
INTO_NEW_FILE = "TCP into a new ramdisk file"


def best(rates: Mapping[str, float], name: str) -> float:
    """Return the best rate, over thread and stream counts, of the limits with this name prefix."""
    return max(rate for limit, rate in rates.items() if limit.startswith(name))


def plain_writers(count: int) -> str:
    """Return the name of the limit with so many writers."""
    return f"plain writes to storage, synced, {_several(count, 'writer')}"


def plain_readers(count: int) -> str:
    """Return the name of the limit with so many readers."""
    return f"plain reads from storage, {_several(count, 'reader')}"


def measure(ramdisk: Path, storage: Path, size_bytes: int) -> dict[str, float]:
    """Return GB/s (1e9 bytes) by name: the median of a few repeats, after a warm-up.

    All memory is touched before it is timed, except memory that is called new. Uses up to four
    times ``size_bytes`` of memory. OSError when the ramdisk or ``storage`` is full or there is no
    loopback.
    """
    threads = sorted({1, len(os.sched_getaffinity(0))})
    source = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    target = np.ones_like(source)
    rates: dict[str, float] = {}
    for count in threads:
        copy = partial(_copy, source, target, count)
        rates[f"memcpy, {_several(count, 'thread')}"] = _rate(size_bytes, copy)
    rates |= _ramdisk_rates(source, ramdisk, threads)
    for kind, new_in in ((LOOPBACK, None), (INTO_NEW_FILE, ramdisk)):
        for count in _STREAMS:
            send = partial(send_over_loopback, source, count, new_in)
            rates[f"{kind}, {_several(count, 'stream')}"] = _rate(size_bytes, send)
    for count in _WRITERS:
        rates[plain_writers(count)] = _rate(
            size_bytes, partial(_write_files, source, storage, count)
        )
    return rates | _reader_rates(source, storage)


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _rate(size_bytes: int, work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size_bytes / statistics.median(seconds) / 1e9


def _copy(source: np.ndarray, target: np.ndarray, threads: int) -> None:
    parts = zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda pair: np.copyto(*pair), parts))


def _ramdisk_rates(source: np.ndarray, ramdisk: Path, threads: list[int]) -> dict[str, float]:
    size_bytes, ranges = source.nbytes, [(0, source.nbytes)]
    rates: dict[str, float] = {}
    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        # The mapping goes with the last array over it.
        plain = np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)
        mapping = _native.Mapping(file.fileno(), size_bytes, writable=True)
        _native.prefault(mapping, 0, size_bytes, threads[-1])
        # The C library copies with non-temporal stores what is much larger than the cache.
        works: dict[str, Callable[[int], object]] = {
            "non-temporal copy into a mapped ramdisk file": partial(_copy, source, plain),
            COPY_WITH_CRC: partial(_native.copy_crc32c, mapping, [(source, 0)]),
            "CRC32C of a mapped ramdisk file": partial(_native.crc32c_ranges, mapping, ranges),
            FIRST_CRC: partial(_first_crc, file.fileno(), size_bytes),
        }
        for kind, work in works.items():
            for count in threads:
                name = f"{kind}, {_several(count, 'thread')}"
                rates[name] = _rate(size_bytes, partial(work, count))
        mapping.close()
    return rates


def _first_crc(fd: int, size_bytes: int, threads: int) -> None:
    """Map the file anew and read all of it once."""
    mapping = _native.Mapping(fd, size_bytes, writable=False)
    _native.crc32c_ranges(mapping, [(0, size_bytes)], threads)
    mapping.close()


def _write_files(source: np.ndarray, directory: Path, writers: int) -> None:
    """Write ``source`` once, each writer its part into a new file, and sync it to the disk."""

    def write(path: Path, part: np.ndarray) -> None:
        with path.open("wb") as file:
            part.tofile(file)
            os.fsync(file.fileno())

    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="eckpt-bench-") as folder,
        ThreadPoolExecutor(writers) as pool,
    ):
        paths = [Path(folder, str(number)) for number in range(writers)]
        list(pool.map(write, paths, np.array_split(source, writers)))


def _reader_rates(source: np.ndarray, storage: Path) -> dict[str, float]:
    """Return the rates of all readers together: processes that read the same file.

    Each process of a job needs its own copy of what it restores, in new memory.
    """
    context = multiprocessing.get_context("spawn")
    rates: dict[str, float] = {}
    with tempfile.NamedTemporaryFile(dir=storage, prefix="eckpt-bench-") as file:
        source.tofile(file.name)
        for readers in _READERS:
            with ProcessPoolExecutor(readers, mp_context=context) as pool:
                read = partial(_read_together, pool, [file.name] * readers)
                rates[plain_readers(readers)] = _rate(readers * source.nbytes, read)
    return rates


def _read_together(pool: ProcessPoolExecutor, paths: list[str]) -> None:
    list(pool.map(_bytes_read, paths))


def _bytes_read(path: str) -> int:
    return np.fromfile(path, np.uint8).nbytes


def send_over_loopback(source: np.ndarray, streams: int, new_in: Path | None) -> None:
    """Send ``source`` once, into a new file in the directory ``new_in`` if it is given."""
    with (
        contextlib.ExitStack() as stack,
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(2 * streams) as pool,
    ):
        keep = None
        if new_in is not None:
            keep = stack.enter_context(tempfile.TemporaryFile(dir=new_in, prefix="eckpt-bench-"))
        server.settimeout(_NETWORK_TIMEOUT_S)
        ends, offset = [], 0
        for part in np.array_split(source, streams):
            sender = socket.create_connection(server.getsockname(), _NETWORK_TIMEOUT_S)
            receiver, _ = server.accept()
            kept = None if keep is None else (keep.fileno(), offset)
            ends.append(pool.submit(_receive, receiver, part.nbytes, kept))
            offset += part.nbytes
            ends.append(pool.submit(_send, sender, part))
        for end in ends:
            end.result()


def _send(connection: socket.socket, data: np.ndarray) -> None:
    with connection:
        connection.settimeout(_NETWORK_TIMEOUT_S)
        connection.sendall(data.data)


def _receive(connection: socket.socket, size_bytes: int, kept: tuple[int, int] | None) -> None:
    """Receive over one connection, into a file if ``kept`` gives its descriptor and offset.

    Without ``kept`` the pieces overwrite each other. The rate is then an upper limit, because a
    receiver that keeps the bytes needs memory for all of them.
    """
    piece = memoryview(bytearray(_SOCKET_PIECE_BYTES if kept is None else _KEPT_PIECE_BYTES))
    left = size_bytes
    with connection:
        connection.settimeout(_NETWORK_TIMEOUT_S)
        while left:
            received = connection.recv_into(piece[: min(left, len(piece))])
            if received == 0:
                raise ConnectionError(f"loopback stream ended with {left} bytes to come")
            if kept is not None:
                fd, offset = kept
                written = os.pwrite(fd, piece[:received], offset + size_bytes - left)
                assert written == received, "a ramdisk writes all or fails"
            left -= received
