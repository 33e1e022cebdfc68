"""Reads of one step in a bucket while single requests stall: what came, what was asked twice."""

from __future__ import annotations

import json
import os
import time
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from bucket_reads_program import STEP, Memory, save
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state import BoxTable, describe
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.work_progress import WorkProgress

LEAVES = 24
SHAPE = (512, 1024)  # 2 MiB
NODES = 3
"""Requests of a data file for the database's nodes at most, before those for two chunks or so."""


class Reads:
    def __init__(self, gcs: GcsControl) -> None:
        self.gcs = gcs
        self.tier = PersistentTier("gs://bucket/run")
        values = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
        self.state = {f"leaf{n:02}": jax.device_put(values + np.float32(n)) for n in range(LEAVES)}
        save(self.tier, self.state)
        self.stored = self.tier.describe(self.tier.find(STEP))
        self.shards = sorted(BoxTable(describe(self.state, "restore"), 1).shards_of(0))
        self.expected = [np.asarray(self.state[shard.leaf]).tobytes() for shard in self.shards]

    def read(self, rule: FaultRule, within_s: float = 60.0) -> dict[str, Any]:
        """Read the step with the fault in force until the end."""
        arrays = {path: leaf.array for path, leaf in self.stored.leaves.items()}
        ends = list(accumulate(map(len, self.expected)))
        memory, told, error = Memory(ends[-1]), list[int](), ""
        with self.gcs.fault(rule):
            try:
                self.tier.read_into(
                    self.stored.item,
                    arrays,
                    list(zip(self.shards, [0, *ends[:-1]], strict=True)),
                    memory,
                    complete=True,
                    progress=WorkProgress.until(time.monotonic() + within_s),
                    on_hedged=lambda leaf, nbytes, reason: told.append(nbytes),
                )
            except PersistentTierError as failure:
                error = type(failure).__name__
            hit = self.gcs.fault_states()[0].hit
        found = {"same": bytes(memory.data) == b"".join(self.expected), "hit": hit}
        found |= {"hedged": len(told), "hedged_bytes": sum(told)}
        return {**found, "error": error} if error else found


def main() -> None:
    reads = Reads(GcsControl(os.environ["STORAGE_EMULATOR_HOST"]))
    media, data = "objects.media", f"bucket/run/{STEP}/*/d/*"
    found = {
        "box_bytes": int(np.prod(SHAPE)) * 4,
        "undisturbed": reads.read(FaultRule(kind="delay", target="bucket/other")),
        "stalled_node": reads.read(FaultRule(kind="hold", operation=media, target=data, count=1)),
        "stalled_data": reads.read(
            FaultRule(kind="hold", operation=media, target=data, skip=NODES, count=1)
        ),
        "slow_data": reads.read(
            FaultRule(
                kind="trickle",
                operation=media,
                target=data,
                skip=NODES,
                count=1,
                bytes_per_s=1 << 14,
            )
        ),
        "slow_alike": reads.read(
            FaultRule(kind="throttle", operation=media, target=data, bytes_per_s=8 << 20)
        ),
        "all_stall": reads.read(FaultRule(kind="hold", operation=media, target=data), 12.0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
