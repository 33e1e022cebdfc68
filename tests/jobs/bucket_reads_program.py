"""One step in a bucket that answers each request after 30 ms, and what a read of it asks for."""

from __future__ import annotations

import json
import os
import time
from itertools import accumulate

import jax
import numpy as np
from fake_gcs import FaultRule, GcsControl, RequestRecord
from persistent_steps import life, writer_of
from state_samples import on_host

from emergency_ckpt.state import BoxTable, describe
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

LEAVES = 24
SHAPE = (512, 1024)  # 2 MiB
SMALL_LEAVES = 300
STEP = 3


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


def main() -> None:
    gcs = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    tier = PersistentTier("gs://bucket/run")
    values = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    state = {f"leaf{n:02}": jax.device_put(values + np.float32(n)) for n in range(LEAVES)}
    state |= {f"small{n:03}": jax.device_put(values[n]) for n in range(SMALL_LEAVES)}
    save(tier, state)
    gcs.clear_requests()
    with gcs.fault(FaultRule(kind="delay", delay_s=0.03, target="bucket/*")):
        stored = tier.describe(tier.find(STEP))
        described = len(gcs.requests())
        gcs.clear_requests()
        arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
        shards = sorted(BoxTable(describe(state, "restore"), 1).shards_of(0))
        ends = list(accumulate(state[shard.leaf].nbytes for shard in shards))
        memory = Memory(ends[-1])
        boxes = list(zip(shards, [0, *ends[:-1]], strict=True))
        tier.read_into(
            stored.item,
            arrays,
            boxes,
            memory,
            complete=True,
            progress=WorkProgress.until(time.monotonic() + 120),
        )
    requests = gcs.requests()
    expected = b"".join(np.asarray(state[shard.leaf]).tobytes() for shard in shards)
    found = {
        "same": bytes(memory.data) == expected,
        "described": described,
        "requests": len(requests),
        "at_once": most_at_once([each for each in requests if each.bytes_out >= values.nbytes]),
        "served": sum(each.bytes_out for each in requests) / len(expected),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
