"""Reads of one step in a bucket: what came, and what was asked for.

Single requests stall. With the argument ``plain`` each is answered after 100 ms, and the step has
small leaves too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import accumulate
from typing import Any

import jax
import msgspec
import numpy as np
from fake_gcs import FaultRule, GcsControl, RequestRecord
from persistent_steps import life, writer_of
from state_samples import on_host

from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state import BoxTable, describe
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

STEP = 3
LEAVES = 24
SHAPE = (512, 1024)  # 2 MiB
NODES = 3
"""Requests of a data file for the database's nodes at most, before those for two chunks or so."""


SMALL_LEAVES = 300


class Memory:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, data: memoryview, offset: int) -> None:
        self.data[offset : offset + data.nbytes] = data


def save(tier: PersistentTier, state: dict[str, jax.Array]) -> None:
    tree, shards = on_host(state)
    save_id = SaveId(STEP, life(1), "run")
    writer = writer_of(tier)
    writer.begin(save_id.incarnation)
    tier.write_tensors(save_id, tree, shards, (0,))
    leaves = [leaf.spec for leaf in tree.leaves]
    writer.publish(tier.finish(save_id, {0: ("0" * 64, True)}, leaves, {}), None)


def most_at_once(requests: list[RequestRecord]) -> int:
    ends = [(each.time_s, 1) for each in requests]
    ends += [(each.time_s + each.seconds, -1) for each in requests]
    count = most = 0
    for _, change in sorted(ends):
        count += change
        most = max(most, count)
    return most


class Reads:
    """A step in a bucket, and reads of it.

    Attributes:
      described: how many requests it took to describe the step, with ``rule`` in force.
    """

    def __init__(self, gcs: GcsControl, rule: FaultRule, small_leaves: int = 0) -> None:
        self.gcs = gcs
        self.tier = PersistentTier("gs://bucket/run")
        values = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
        self.state = {f"leaf{n:02}": jax.device_put(values + np.float32(n)) for n in range(LEAVES)}
        self.state |= {f"small{n:03}": jax.device_put(values[n]) for n in range(small_leaves)}
        save(self.tier, self.state)
        gcs.clear_requests()
        with gcs.fault(rule):
            self.stored = self.tier.describe(self.tier.find(STEP))
            self.described = len(gcs.requests())
        self.shards = sorted(BoxTable(describe(self.state, "restore"), 1).shards_of(0))
        self.expected = [np.asarray(self.state[shard.leaf]).tobytes() for shard in self.shards]

    def read(self, rule: FaultRule, progress: WorkProgress) -> dict[str, Any]:
        """Read the step with the fault in force until the end."""
        arrays = {path: leaf.array for path, leaf in self.stored.leaves.items()}
        ends = list(accumulate(map(len, self.expected)))
        memory, error = Memory(ends[-1]), ""
        with self.gcs.fault(rule):
            try:
                self.tier.read_into(
                    self.stored.item,
                    arrays,
                    list(zip(self.shards, [0, *ends[:-1]], strict=True)),
                    memory,
                    complete=True,
                    progress=progress,
                )
            except PersistentTierError as failure:
                error = type(failure).__name__
            hit = self.gcs.fault_states()[0].hit
        found = {"same": bytes(memory.data) == b"".join(self.expected), "hit": hit}
        return {**found, "error": error} if error else found


def plain(gcs: GcsControl) -> dict[str, Any]:
    """Read the step where each request takes its time, and count."""
    rule = FaultRule(kind="delay", delay_s=0.1, target="bucket/*")
    reads = Reads(gcs, rule, SMALL_LEAVES)
    gcs.clear_requests()
    found = reads.read(rule, WorkProgress.until(time.monotonic() + 120))
    requests, large_bytes = gcs.requests(), int(np.prod(SHAPE)) * 4
    return {
        **found,
        "described": reads.described,
        "requests": len(requests),
        "at_once": most_at_once([each for each in requests if each.bytes_out >= large_bytes]),
        "served": sum(each.bytes_out for each in requests) / sum(map(len, reads.expected)),
    }


def stalled(gcs: GcsControl) -> dict[str, Any]:
    nothing = FaultRule(kind="delay", target="bucket/other")
    reads = Reads(gcs, nothing)
    media, data = "objects.media", f"bucket/run/{STEP}/*/d/*"
    hold = FaultRule(kind="hold", operation=media, target=data, count=1)
    limits = TimeLimits(stall_s=20.0, total_s=600.0)
    return {
        "stalled_node": reads.read(hold, WorkProgress(limits)),
        "stalled_data": reads.read(msgspec.structs.replace(hold, skip=NODES), WorkProgress(limits)),
        "all_stall": reads.read(
            FaultRule(kind="hold", operation=media, target=data),
            WorkProgress(TimeLimits(stall_s=6.0, total_s=600.0)),
        ),
    }


if __name__ == "__main__":
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    print(json.dumps(plain(control) if sys.argv[1:] == ["plain"] else stalled(control)))
