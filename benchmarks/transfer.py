"""Measure the throughput of a fetch between two processes on loopback against plain sockets.

    python -m benchmarks.transfer [--mib 1024] [--streams 1,2,4] [--repeat 5]

Prints the GB/s of the best and the median round of plain sockets and of a fetch, the ratio of the
medians, and the CPU time of both processes, for one big shard and for 2,000 small ones. The rounds
alternate. The baseline sends as many bytes of a tmpfs file with ``sendfile`` and receives with
``recv_into`` into memory touched before, without CRC and authentication.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from memory_holdings import MemoryHoldings, anonymous_mapping

from benchmarks.common.program import positive, positives
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import SaveId

RUN_ID = "benchmark"
SECRET = b"00" * 32
SMALL_COUNT, SMALL_BYTES = 2000, 64 << 10
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 600.0

Peer = tuple[int, Callable[[], object]]
"""The process id of a peer, and a function that receives all bytes from it once."""


def serve(pipe: Connection, nbytes: int) -> None:
    """Run the peer process, which serves one big shard and 2,000 small ones."""
    holdings = MemoryHoldings()
    big = holdings.add(SaveId(1, "i", RUN_ID), [os.urandom(1 << 20) * (nbytes >> 20)])
    small = holdings.add(SaveId(2, "i", RUN_ID), [os.urandom(SMALL_BYTES)] * SMALL_COUNT)
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
        pipe.send((server.contact, big, small))
        pipe.recv()


def serve_plain(pipe: Connection, path: Path, streams: int) -> None:
    """Run the baseline's peer, which sends each connection its part of the file by sendfile."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        path.open("rb") as file,
        ThreadPoolExecutor(streams) as pool,
    ):
        pipe.send(listener.getsockname())
        size = path.stat().st_size // streams

        def send(sock: socket.socket, index: int) -> None:
            with sock:
                offset, end = index * size, (index + 1) * size
                while offset < end:
                    offset += os.sendfile(sock.fileno(), file.fileno(), offset, end - offset)

        while True:
            sockets = [listener.accept()[0] for _ in range(streams)]
            list(pool.map(send, sockets, range(streams)))


def receive_plain(address: tuple[str, int], streams: int, memory: memoryview) -> None:
    """Receive ``memory`` over several connections at once."""
    size = len(memory) // streams

    def receive(index: int) -> None:
        with socket.create_connection(address) as sock:
            part = memory[index * size : (index + 1) * size]
            done = 0
            while done < size:
                done += sock.recv_into(part[done : done + CHUNK_BYTES])

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(receive, range(streams)))


@contextlib.contextmanager
def plain_peer(nbytes: int, streams: int) -> Iterator[Peer]:
    """Run the machine's own limit: a peer process that sends a file on the ramdisk."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(bytes(nbytes))
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(os.urandom(nbytes))
        file.flush()
        ours, theirs = multiprocessing.Pipe()
        peer = multiprocessing.get_context("fork").Process(
            target=serve_plain, args=(theirs, Path(file.name), streams), daemon=True
        )
        peer.start()
        theirs.close()
        assert peer.pid is not None
        try:
            yield peer.pid, partial(receive_plain, ours.recv(), streams, memoryview(memory))
        finally:
            peer.kill()
            peer.join()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of ``pid`` so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(what: str, peers: dict[str, Peer], nbytes: int, repeat: int) -> None:
    """Receive from the peers in turn; print rates and CPU time."""
    rates: dict[str, list[float]] = {name: [] for name in peers}
    used_s = dict.fromkeys(peers, 0.0)
    for turn in range(repeat + 1):
        for name, (peer, receive) in peers.items():
            before_s, start_s = cpu_s(peer) + time.process_time(), time.perf_counter()
            receive()
            rate = nbytes / (time.perf_counter() - start_s) / 1e9
            if turn > 0:  # the first warms up
                rates[name].append(rate)
                used_s[name] += cpu_s(peer) + time.process_time() - before_s
    base = statistics.median(rates["plain"])
    for name, each in rates.items():
        median, cpu = statistics.median(each), used_s[name] / repeat / nbytes * 2**30
        print(
            f"{what}, {name:5} best {max(each):5.2f} GB/s  median {median:5.2f} GB/s"
            f"  {median / base:4.2f} of plain  {cpu:4.2f} CPU s/GiB at both ends"
        )


def measure_all(nbytes: int, streams: list[int], repeat: int) -> None:
    """Measure plain sockets and a fetch, one big shard and small ones, by number of streams."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    # Daemons: this process may end at any print, when whoever reads its output has gone.
    peer = context.Process(target=serve, args=(theirs, nbytes), daemon=True)
    peer.start()
    theirs.close()
    address, big, small = ours.recv()
    assert peer.pid is not None
    into = anonymous_mapping(max(nbytes, SMALL_COUNT * SMALL_BYTES))
    one = [ShardTarget(0, nbytes, 0)]
    many = [ShardTarget(i, SMALL_BYTES, i * SMALL_BYTES) for i in range(SMALL_COUNT)]
    for count in streams:
        with TransferClient(run_id=RUN_ID, secret=SECRET, streams=count) as client:
            for what, digest, wanted in (
                ("1 shard", big, one),
                (f"{SMALL_COUNT:,} x {SMALL_BYTES >> 10} KiB", small, many),
            ):
                total = sum(target.nbytes for target in wanted)
                fetch = partial(client.fetch_shards, address, digest, wanted, into, TIMEOUT_S)
                with plain_peer(total, count) as plain:
                    peers: dict[str, Peer] = {"plain": plain, "fetch": (peer.pid, fetch)}
                    measure(f"{what}, {count} streams", peers, total, repeat)
    ours.send(None)
    peer.join()


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=positive, default=1024)
    parser.add_argument("--streams", type=positives, default=[1, 2, 4])
    parser.add_argument("--repeat", type=positive, default=5)
    args = parser.parse_args()
    measure_all(args.mib << 20, args.streams, args.repeat)


if __name__ == "__main__":
    main()
