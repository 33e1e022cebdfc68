"""Rates of the machine itself, measured in the same run: upper limits for every checkpointer."""

import contextlib
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from emergency_ckpt import _native

STREAMS = (1, 2, 4)
WRITERS = (1, 2, 4)
_REPEATS = 3
_SOCKET_PIECE_BYTES = 4 * 2**20
_KEPT_PIECE_BYTES = 256 * 2**10  # stays in the cache until it is written
_NETWORK_TIMEOUT_S = 60.0


COPY_WITH_CRC = "copy with CRC32C into a mapped ramdisk file"
LOOPBACK = "loopback TCP"
FIRST_CRC = "CRC32C of a ramdisk file mapped anew"
INTO_NEW_FILE = "TCP into a new ramdisk file"
PLAIN_WRITERS = "plain writes to storage, synced"


def best(rates: Mapping[str, float], name: str) -> float:
    """Return the best rate, over thread and stream counts, of the limits with this name prefix."""
    return max(rate for limit, rate in rates.items() if limit.startswith(name))


def plain_writers(count: int) -> str:
    """Return the name of the limit with so many writers."""
    return f"{PLAIN_WRITERS}, {count} writer{'s' if count > 1 else ''}"


def measure(ramdisk: Path, storage: Path, size_bytes: int) -> dict[str, float]:
    """Return GB/s (1e9 bytes) by name: the median of a few repeats, after a warm-up.

    All memory is touched before it is timed, except memory that is called new. Uses up to three
    times ``size_bytes`` of memory. OSError when the ramdisk or ``storage`` is full or there is no
    loopback.
    """
    threads = len(os.sched_getaffinity(0))
    source = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    return {
        **_memory_copies(source, threads),
        **_mapped_copies(source, ramdisk, threads),
        **{
            f"{LOOPBACK}, {count} stream{'s' * (count > 1)}": _rate(
                size_bytes, lambda count=count: _send_over_loopback(source, count)
            )
            for count in STREAMS
        },
        **{
            f"{INTO_NEW_FILE}, {count} stream{'s' * (count > 1)}": _rate(
                size_bytes, lambda count=count: _send_over_loopback(source, count, ramdisk)
            )
            for count in STREAMS
        },
        **{
            plain_writers(count): _rate(
                size_bytes, lambda count=count: _write_files(source, storage, count)
            )
            for count in WRITERS
        },
    }


def _rate(size_bytes: int, work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size_bytes / statistics.median(seconds) / 1e9


def _memory_copies(source: np.ndarray, threads: int) -> dict[str, float]:
    target = np.ones_like(source)
    return {
        f"memcpy, {_threads(count)}": _rate(
            source.nbytes, lambda count=count: _copy(source, target, count)
        )
        for count in sorted({1, threads})
    }


def _copy(source: np.ndarray, target: np.ndarray, threads: int) -> None:
    parts = zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda pair: np.copyto(*pair), parts))


def _mapped_copies(source: np.ndarray, ramdisk: Path, threads: int) -> dict[str, float]:
    with tempfile.TemporaryFile(dir=ramdisk, prefix="eckpt-bench-") as file:
        os.posix_fallocate(file.fileno(), 0, source.nbytes)
        mapping = _native.Mapping(file.fileno(), source.nbytes, writable=True)
        _native.prefault(mapping, 0, source.nbytes, threads)
        rates = _plain_copies(source, file.fileno(), threads)
        for count in sorted({1, threads}):
            rates[f"{COPY_WITH_CRC}, {_threads(count)}"] = _rate(
                source.nbytes,
                lambda count=count: _native.copy_crc32c(mapping, [(source, 0)], count),
            )
        for count in sorted({1, threads}):
            rates[f"CRC32C of a mapped ramdisk file, {_threads(count)}"] = _rate(
                source.nbytes,
                lambda count=count: _native.crc32c_ranges(mapping, [(0, source.nbytes)], count),
            )
        mapping.close()
        for count in sorted({1, threads}):
            rates[f"{FIRST_CRC}, {_threads(count)}"] = _rate(
                source.nbytes,
                lambda count=count: first_crc(file.fileno(), source.nbytes, count),
            )
    return rates


def first_crc(fd: int, size_bytes: int, threads: int) -> None:
    """Map the file anew and read all of it once."""
    mapping = _native.Mapping(fd, size_bytes, writable=False)
    _native.crc32c_ranges(mapping, [(0, size_bytes)], threads)
    mapping.close()


def _plain_copies(source: np.ndarray, fd: int, threads: int) -> dict[str, float]:
    # The C library copies with non-temporal stores what is much larger than the cache. The mapping
    # goes with the last array over it.
    target = np.frombuffer(mmap.mmap(fd, source.nbytes), np.uint8)
    return {
        f"non-temporal copy into a mapped ramdisk file, {_threads(count)}": _rate(
            source.nbytes, lambda count=count: _copy(source, target, count)
        )
        for count in sorted({1, threads})
    }


def _write_files(source: np.ndarray, directory: Path, writers: int) -> None:
    """Write ``source`` once, each writer its part into a new file, and sync it to the disk."""

    def write(path: Path, part: np.ndarray) -> None:
        with path.open("wb", buffering=0) as file:
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="eckpt-bench-") as folder,
        ThreadPoolExecutor(writers) as pool,
    ):
        paths = [Path(folder, str(number)) for number in range(writers)]
        list(pool.map(write, paths, np.array_split(source, writers)))


def _send_over_loopback(source: np.ndarray, streams: int, new_in: Path | None = None) -> None:
    """Send ``source`` once, into a new file in the directory ``new_in`` if it is given."""
    parts = np.array_split(source, streams)
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
        for part in parts:
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


def _receive(
    connection: socket.socket, size_bytes: int, kept: tuple[int, int] | None = None
) -> None:
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
                fd, end = kept[0], kept[1] + size_bytes
                written = os.pwrite(fd, piece[:received], end - left)
                assert written == received, "a ramdisk writes all or fails"
            left -= received


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
