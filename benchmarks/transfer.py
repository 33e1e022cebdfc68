"""Throughput of a fetch between two processes on loopback, beside plain sockets.

    python benchmarks/transfer.py [--mib 1024] [--streams 1,2,4] [--repeat 3]

Prints GB/s of the best and median round. The baseline sends the same tmpfs file with ``sendfile``
and receives with ``recv_into`` into memory touched before: no CRC, no authentication.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from arguments import positive, positives

from emergency_ckpt.testing.memory_holdings import MemoryHoldings, anonymous_mapping
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.holdings import ShardTarget
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import SaveId

RUN_ID = "benchmark"
SECRET = b"00" * 32
SMALL = (2000, 64 << 10)
CHUNK_BYTES = 1 << 20


def serve(pipe: Connection, nbytes: int) -> None:
    """The peer process: one big shard and 2,000 small ones."""
    holdings = MemoryHoldings()
    big = holdings.add(SaveId(1, "i", RUN_ID), [os.urandom(1 << 20) * (nbytes >> 20)])
    small = holdings.add(SaveId(2, "i", RUN_ID), [os.urandom(SMALL[1])] * SMALL[0])
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
        pipe.send((server.address, big, small))
        pipe.recv()


def serve_plain(pipe: Connection, path: Path, streams: int) -> None:
    """The baseline's peer: each connection gets its part of the file by sendfile."""
    with socket.create_server(("127.0.0.1", 0)) as listener, path.open("rb") as file:
        pipe.send(listener.getsockname())
        size = path.stat().st_size // streams

        def send(sock: socket.socket, index: int) -> None:
            with sock:
                offset, end = index * size, (index + 1) * size
                while offset < end:
                    offset += os.sendfile(sock.fileno(), file.fileno(), offset, end - offset)

        while True:
            threads = []
            for index in range(streams):
                sock, _ = listener.accept()
                threads.append(threading.Thread(target=send, args=(sock, index)))
                threads[-1].start()
            for thread in threads:
                thread.join()


def receive_plain(address: tuple[str, int], streams: int, memory: memoryview) -> None:
    """Receive ``memory`` over several connections at once."""
    size = len(memory) // streams

    def receive(index: int) -> None:
        with socket.create_connection(address) as sock:
            part = memory[index * size : (index + 1) * size]
            done = 0
            while done < size:
                done += sock.recv_into(part[done : done + CHUNK_BYTES])

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report(name: str, nbytes: int, repeat: int, action: Callable[[], object]) -> None:
    """Print the rate of ``action`` over ``repeat`` rounds."""
    rates: list[float] = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        action()
        rates.append(nbytes / (time.perf_counter() - start_s) / 1e9)
    print(f"{name:34} best {max(rates):5.2f} GB/s  median {statistics.median(rates):5.2f} GB/s")


def measure_plain(nbytes: int, streams: int, repeat: int) -> None:
    """The machine's own limit."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(bytes(nbytes))
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(dir=shared) as file:
        file.write(os.urandom(1 << 20) * (nbytes >> 20))
        file.flush()
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        peer = context.Process(target=serve_plain, args=(theirs, Path(file.name), streams))
        peer.start()
        address = ours.recv()
        view = memoryview(memory)
        report(
            f"plain sockets, {streams} streams",
            nbytes,
            repeat,
            lambda: receive_plain(address, streams, view),
        )
        peer.kill()
        peer.join()


def measure_fetch(nbytes: int, streams: list[int], repeat: int) -> None:
    """fetch_shards: authenticated, into a mapped slot, with the CRC32C of every shard."""
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, nbytes))
    peer.start()
    address, big, small = ours.recv()
    into = anonymous_mapping(max(nbytes, SMALL[0] * SMALL[1]))
    wanted = [ShardTarget(i, SMALL[1], i * SMALL[1]) for i in range(SMALL[0])]
    for count in streams:
        with TransferClient(run_id=RUN_ID, secret=SECRET, streams=count) as client:
            one = [ShardTarget(0, nbytes, 0)]
            report(
                f"fetch one shard, {count} streams",
                nbytes,
                repeat,
                lambda client=client, one=one: client.fetch_shards(address, big, one, into, 600),
            )
            report(
                f"fetch 2,000 x 64 KiB, {count} streams",
                SMALL[0] * SMALL[1],
                repeat,
                lambda client=client: client.fetch_shards(address, small, wanted, into, 600),
            )
    ours.send(None)
    peer.join()


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=positive, default=1024)
    parser.add_argument("--streams", type=positives, default=[1, 2, 4])
    parser.add_argument("--repeat", type=positive, default=5)
    args = parser.parse_args()
    for count in args.streams:
        measure_plain(args.mib << 20, count, args.repeat)
    measure_fetch(args.mib << 20, args.streams, args.repeat)


if __name__ == "__main__":
    main()
