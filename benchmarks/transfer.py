"""Measure the throughput of a fetch between two processes on loopback against plain sockets.

    python -m benchmarks.transfer [--mib 1024] [--streams 1,2,4] [--repeat 5]

Prints the GB/s of the best and the median round of plain sockets and of a fetch, the ratio of the
medians, and the CPU time of both processes, for one big shard and for 2,000 small ones. The rounds
alternate. The baseline sends as many bytes of a tmpfs file with ``sendfile`` and receives with
``recv_into`` into memory touched before, without CRC and authentication.
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
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

from memory_holdings import MemoryHoldings, anonymous_mapping

from benchmarks.common.arguments import positive, positives
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import SaveId

RUN_ID = "benchmark"
SECRET = b"00" * 32
SMALL = (2000, 64 << 10)
CHUNK_BYTES = 1 << 20


def serve(pipe: Connection, nbytes: int) -> None:
    """Run the peer process, which serves one big shard and 2,000 small ones."""
    holdings = MemoryHoldings()
    big = holdings.add(SaveId(1, "i", RUN_ID), [os.urandom(1 << 20) * (nbytes >> 20)])
    small = holdings.add(SaveId(2, "i", RUN_ID), [os.urandom(SMALL[1])] * SMALL[0])
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
        pipe.send((server.contact, big, small))
        pipe.recv()


def serve_plain(pipe: Connection, path: Path, streams: int) -> None:
    """Run the baseline's peer, which sends each connection its part of the file by sendfile."""
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


class Plain:
    """The machine's own limit: a peer process that sends a file on the ramdisk."""

    def __init__(self, nbytes: int, streams: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self._memory.write(bytes(nbytes))
        self._streams = streams
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._file = tempfile.NamedTemporaryFile(dir=shared)  # noqa: SIM115  closed by close
        self._file.write(os.urandom(nbytes))
        self._file.flush()
        ours, theirs = multiprocessing.Pipe()
        self._peer = multiprocessing.get_context("fork").Process(
            target=serve_plain, args=(theirs, Path(self._file.name), streams), daemon=True
        )
        self._peer.start()
        theirs.close()
        self._address = ours.recv()

    @property
    def peer_id(self) -> int:
        """Return the id of the peer's process."""
        assert self._peer.pid is not None
        return self._peer.pid

    def receive(self) -> None:
        """Receive the whole file once."""
        receive_plain(self._address, self._streams, memoryview(self._memory))

    def close(self) -> None:
        """End the peer."""
        self._peer.kill()
        self._peer.join()
        self._file.close()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of ``pid`` so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    what: str, actions: dict[str, tuple[int, Callable[[], object]]], nbytes: int, repeat: int
) -> None:
    """Run the actions, each with the id of its peer's process, in turn; print rates and CPU."""
    rates: dict[str, list[float]] = {name: [] for name in actions}
    used_s = dict.fromkeys(actions, 0.0)
    for turn in range(repeat + 1):
        for name, (peer, action) in actions.items():
            before_s, start_s = cpu_s(peer) + time.process_time(), time.perf_counter()
            action()
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
    peer_id = peer.pid
    into = anonymous_mapping(max(nbytes, SMALL[0] * SMALL[1]))
    one = [ShardTarget(0, nbytes, 0)]
    many = [ShardTarget(i, SMALL[1], i * SMALL[1]) for i in range(SMALL[0])]
    for count in streams:
        with TransferClient(run_id=RUN_ID, secret=SECRET, streams=count) as client:
            for what, digest, wanted in (
                ("1 shard", big, one),
                (f"{SMALL[0]:,} x {SMALL[1] >> 10} KiB", small, many),
            ):
                total = sum(target.nbytes for target in wanted)

                def fetch(
                    digest: str = digest,
                    wanted: list[ShardTarget] = wanted,
                    client: TransferClient = client,
                ) -> object:
                    return client.fetch_shards(address, digest, wanted, into, 600)

                with closing(Plain(total, count)) as plain:
                    measured = {
                        "plain": (plain.peer_id, plain.receive),
                        "fetch": (peer_id, fetch),
                    }
                    measure(f"{what}, {count} streams", measured, total, repeat)
    ours.send(None)
    peer.join()


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=positive, default=1024)
    parser.add_argument("--streams", type=positives, default=[1, 2, 4])
    parser.add_argument("--repeat", type=positive, default=5)
    args = parser.parse_args()
    measure_all(args.mib << 20, args.streams, args.repeat)


if __name__ == "__main__":
    main()
