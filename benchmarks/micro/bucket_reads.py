"""Measure a read of one step from a bucket while one request stalls, or is slow.

    python -m benchmarks.micro.bucket_reads [--mib 512] [--rate 60] [--rounds 3]

The bucket is the GCS server of the tests, in a process of its own, with ``--rate`` MB/s for all
requests together. The ways take turns: undisturbed; one request for data that is held until the
read has ended; one at a hundredth of the rate. Prints the median seconds of each, its ratio to the
undisturbed, and the bytes that came twice at most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import accumulate
from typing import Any

import msgspec
from fake_gcs import FakeGcs, FaultRule, GcsControl

from benchmarks.common.arguments import above_0, positive
from benchmarks.common.tables import markdown, number

_BUCKET = "bucket"
_STEP = 1
_LEAVES = 32
_PASSING = 8
"""Requests that pass before the fault: for the nodes of the database, and a few for data."""
_CHILD = "--against"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=positive, default=512)
    parser.add_argument("--rate", type=above_0, default=60.0, help="MB/s of the bucket")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(_CHILD, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.against:
        return _measure(options)
    with FakeGcs(buckets=[_BUCKET]) as gcs:
        # The clients read their environment when they are imported.
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        given = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "benchmarks.micro.bucket_reads", *given, _CHILD, gcs.url]
        return subprocess.run(command, env=environ, check=False).returncode


class _Memory:
    """Takes what is read and keeps one piece of it."""

    def write(self, data: memoryview, offset: int) -> None:
        self.last = bytes(data[:64]), offset


def _measure(options: argparse.Namespace) -> int:
    from emergency_ckpt.work_progress import WorkProgress  # noqa: PLC0415

    gcs = GcsControl(options.against)
    tier, item, arrays, boxes = _saved(options.mib)
    rate = int(options.rate * 1e6)
    data = FaultRule(
        kind="throttle",
        operation="objects.media",
        target=f"{_BUCKET}/*/d/*",
        bytes_per_s=rate,
    )
    one = msgspec.structs.replace(data, skip=_PASSING, count=1)
    faults = {
        "undisturbed": None,
        "one request stalls": msgspec.structs.replace(one, kind="hold"),
        "one at a hundredth of the rate": msgspec.structs.replace(
            one, kind="trickle", bytes_per_s=rate // 100
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in faults}
    twice: dict[str, int] = dict.fromkeys(faults, 0)
    for _ in range(options.rounds):
        for name, fault in faults.items():
            told: list[int] = []
            for rule in filter(None, (fault, data)):
                gcs.add_fault(rule)
            start_s = time.monotonic()
            tier.read_into(
                item,
                arrays,
                boxes,
                _Memory(),
                complete=True,
                progress=WorkProgress.until(start_s + 600),
                on_hedged=lambda leaf, nbytes, reason, told=told: told.append(nbytes),
            )
            seconds[name].append(time.monotonic() - start_s)
            twice[name] = max(twice[name], sum(told))
            gcs.clear_faults()
    table = [["", "s", "of undisturbed", "twice, MiB"]]
    quiet_s = statistics.median(seconds["undisturbed"])
    for name, found in seconds.items():
        median_s = statistics.median(found)
        cells = (median_s, median_s / quiet_s, twice[name] / 2**20)
        table.append([name, *map(number, cells)])
    load = os.getloadavg()[0]
    print(f"{options.mib} MiB, {options.rate:g} MB/s, load {load:.0f} on {os.cpu_count()} cores")
    print(markdown(table))
    return 0


def _saved(mib: int) -> tuple[Any, str, Any, list[tuple[Any, int]]]:
    """Save one step; return the tier, the step's item and arrays, and boxes with their offsets."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from emergency_ckpt.state.staging import HostShard  # noqa: PLC0415
    from emergency_ckpt.state.tree import BoxTable, describe  # noqa: PLC0415
    from emergency_ckpt.storage.orbax_reader import open_by_name  # noqa: PLC0415
    from emergency_ckpt.storage.tier import PersistentTier  # noqa: PLC0415
    from emergency_ckpt.types import SaveId  # noqa: PLC0415

    rows = mib * 2**20 // _LEAVES // 4096
    random = np.random.default_rng(0)
    state = {
        f"leaf_{n:02}": jax.device_put(random.standard_normal((rows, 1024), dtype=np.float32))
        for n in range(_LEAVES)
    }
    tree = describe(state, "save")
    shards = sorted(BoxTable(tree, 1).shards_of(0))
    tier = PersistentTier(f"gs://{_BUCKET}/run")
    save = SaveId(step=_STEP, incarnation="life", run_id="run")
    values = {shard: HostShard(np.asarray(state[shard.leaf]), 0) for shard in shards}
    tier.write_tensors(save, tree, values, (0,))
    item = f"gs://{_BUCKET}/run/{_STEP}/state"
    opened = open_by_name(item, list(state), time.monotonic() + 60)  # pyright: ignore[reportArgumentType]
    assert opened is not None
    ends = list(accumulate(state[shard.leaf].nbytes for shard in shards))
    arrays = {path: leaf.array for path, leaf in opened.items()}
    return tier, item, arrays, list(zip(shards, [0, *ends[:-1]], strict=True))


if __name__ == "__main__":
    sys.exit(main())
