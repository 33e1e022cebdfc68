"""Hosts of one job in this process: the RAM of each, and the server that gives it to peers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tiers_support import publish

from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardId, Writer

SECRET = b"s" * 40
SAVE = SaveId(8, "000000000000-orbax", "run")
SHAPE = (6, 4)
LEAF = LeafSpec("w", "int32", SHAPE)
VALUES = np.arange(1, 25, dtype=np.int32).reshape(SHAPE)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


@dataclass
class Host:
    """One process: its RAM, and the server that gives it to peers."""

    tier: LocalTier
    holdings: ProcessHoldings
    server: TransferServer

    def publish(self, boxes: Sequence[Box]) -> None:
        self.tier.protect([SAVE])  # publishing a part does not cost another part
        shards = {ShardId("w", box): VALUES[at(box)] for box in boxes}
        publish(self.tier, SAVE, (LEAF,), shards, restores=True)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    found: list[Host] = []
    try:
        for index in range(count):
            writer = Writer(process_index=index, process_count=count, slice_index=0, hostname="h")
            tier = LocalTier(root / str(index), "run", writer, copy_threads=1)
            holdings = ProcessHoldings(tier, index)
            server = TransferServer(holdings, run_id="run", secret=SECRET)
            found.append(Host(tier, holdings, server))
            server.start()
            holdings.address = server.address
        yield found
    finally:
        for host in found:
            host.server.stop()
            host.tier.close()
        shutil.rmtree(root)
