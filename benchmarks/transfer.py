"""Measure the throughput of a fetch between two processes on loopback against plain sockets.

    python -m benchmarks.transfer [--mib 1024] [--streams 1,2,4] [--repeat 5]

Prints the GB/s of the best and the median round of plain sockets and of a fetch, the ratio of the
medians, and the CPU time of both processes, for one big shard and for 2,000 small ones. The rounds
alternate. The baseline is the limit "loopback TCP" of the other benchmarks: sockets that carry as
many bytes without CRC and authentication, and whose receiver keeps none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from memory_holdings import MemoryHoldings, anonymous_mapping

from benchmarks.common.limits import send_over_loopback
from benchmarks.common.program import positive, positives
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import SaveId

RUN_ID = "benchmark"
SECRET = b"00" * 32
SMALL_COUNT, SMALL_BYTES = 2000, 64 << 10
TIMEOUT_S = 600.0


def serve(pipe: Connection, nbytes: int) -> None:
    """Run the peer process, which serves one big shard and 2,000 small ones."""
    holdings = MemoryHoldings()
    big = holdings.add(SaveId(1, "i", RUN_ID), [os.urandom(1 << 20) * (nbytes >> 20)])
    small = holdings.add(SaveId(2, "i", RUN_ID), [os.urandom(SMALL_BYTES)] * SMALL_COUNT)
    with TransferServer(holdings, run_id=RUN_ID, secret=SECRET) as server:
        pipe.send((server.contact, big, small))
        pipe.recv()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of ``pid`` so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    what: str, ways: dict[str, Callable[[], object]], server: int, nbytes: int, repeat: int
) -> None:
    """Receive ``nbytes`` in each way in turn; print rates, and the CPU time with the server's."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    used_s = dict.fromkeys(ways, 0.0)
    for turn in range(repeat + 1):
        for name, receive in ways.items():
            before_s, start_s = cpu_s(server) + time.process_time(), time.perf_counter()
            receive()
            rate = nbytes / (time.perf_counter() - start_s) / 1e9
            if turn > 0:  # the first warms up
                rates[name].append(rate)
                used_s[name] += cpu_s(server) + time.process_time() - before_s
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
    # A daemon: this process may end at any print, when whoever reads its output has gone.
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
                sent = np.frombuffer(os.urandom(total), np.uint8)
                ways = {
                    "plain": partial(send_over_loopback, sent, count, None),
                    "fetch": partial(client.fetch_shards, address, digest, wanted, into, TIMEOUT_S),
                }
                measure(f"{what}, {count} streams", ways, peer.pid, total, repeat)
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
