"""Measure a save of one writer to a bucket with a limited rate and a latency for each request.

    python -m benchmarks.micro.bucket_save [--mib 256] [--rate 30] [--latency-ms 30] [--rounds 3]

The bucket is the GCS server of the tests, in a process of its own, in Python: a rate above what one
core serves measures the server. Contenders take turns: plain uploads of the same bytes, 16 at a
time; this package's persistent tier; plain Orbax with its defaults. Prints for each the median
MB/s, its share of the rate and of the plain uploads, the requests of a save, how many of them were
made one after the other, and the requests by kind. Exits with 1 when the tier keeps less than
``--least`` of the rate.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fake_gcs import (
    FakeGcs,
    FaultRule,
    GcsControl,
    RequestRecord,
    round_trips,
)

from benchmarks.common.arguments import above_0, positive
from benchmarks.common.tables import markdown, number

_BUCKET = "bucket"
_LEAVES = 16
_UPLOADS_AT_ONCE = 16
_CHILD = "--against"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=positive, default=256)
    parser.add_argument("--rate", type=above_0, default=30.0, help="MB/s of the bucket")
    parser.add_argument("--latency-ms", type=above_0, default=30.0)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--least", type=above_0, default=0.7, help="share of the rate to keep")
    parser.add_argument(_CHILD, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.against:
        return _measure(options)
    with FakeGcs(buckets=[_BUCKET]) as gcs:
        # The clients read their environment when they are imported.
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        given = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "benchmarks.micro.bucket_save", *given, _CHILD, gcs.url]
        return subprocess.run(command, env=environ, check=False).returncode


def _measure(options: argparse.Namespace) -> int:
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    gcs = GcsControl(options.against)
    rule = FaultRule(
        kind="throttle",
        delay_s=options.latency_ms / 1e3,
        bytes_per_s=int(options.rate * 1e6),
        target=f"{_BUCKET}/*",
    )
    rows = options.mib * 2**20 // _LEAVES // 4096
    random = np.random.default_rng(0)
    state = {
        f"leaf_{i:02}": jax.device_put(random.standard_normal((rows, 1024), dtype=np.float32))
        for i in range(_LEAVES)
    }
    size_bytes = sum(leaf.nbytes for leaf in state.values())
    ways: dict[str, Callable[[dict[str, Any], int], object]] = {
        "plain uploads": functools.partial(_upload, options.against),
        "ours": _save,
        "orbax": _save_with_orbax,
    }
    for way in ways.values():  # the imports are not measured
        way({"leaf": state["leaf_00"][:1]}, 0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    requests: dict[str, list[RequestRecord]] = {}
    for step in range(1, options.rounds + 1):
        for name, way in ways.items():
            gcs.clear_requests()
            with gcs.fault(rule):
                start_s = time.monotonic()
                way(state, step)
                seconds[name].append(time.monotonic() - start_s)
            requests[name] = gcs.requests()
            for each in gcs.object_names(_BUCKET):
                gcs.delete_object(_BUCKET, each)
    rates = {name: size_bytes / statistics.median(found) / 1e6 for name, found in seconds.items()}
    table = [["", "MB/s", "of the rate", "of plain uploads", "requests", "one after the other"]]
    for name, rate in rates.items():
        counts = (len(requests[name]), round_trips(requests[name]))
        shares = (rate / options.rate, rate / rates["plain uploads"])
        table.append([name, *map(number, (rate, *shares, *counts))])
    load = os.getloadavg()[0]
    print(f"{size_bytes / 2**20:g} MiB, {options.rate:g} MB/s, {options.latency_ms:g} ms", end="")
    print(f", load {load:.0f} on {os.cpu_count()} cores")
    print(markdown(table))
    for name, records in requests.items():
        kinds = Counter(record.operation for record in records)
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    return 0 if rates["ours"] >= options.least * options.rate else 1


def _upload(url: str, state: dict[str, Any], step: int) -> None:
    import numpy as np  # noqa: PLC0415

    def upload(name: str) -> None:
        path = f"/upload/storage/v1/b/{_BUCKET}/o?uploadType=media&name=plain/{step}/{name}"
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        try:
            connection.request("POST", path, memoryview(np.asarray(state[name])).cast("B"))
            connection.getresponse().read()
        finally:
            connection.close()

    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as pool:
        list(pool.map(upload, state))


def _save(state: dict[str, Any], step: int) -> None:
    import numpy as np  # noqa: PLC0415

    from emergency_ckpt.state.staging import HostShard  # noqa: PLC0415
    from emergency_ckpt.state.tree import BoxTable, describe  # noqa: PLC0415
    from emergency_ckpt.storage.tier import PersistentTier  # noqa: PLC0415
    from emergency_ckpt.types import SaveId  # noqa: PLC0415

    tree = describe(state, "save")
    ids = BoxTable(tree, 1).shards_of(0)
    shards = {
        shard: HostShard(
            np.asarray(state[shard.leaf])[tuple(slice(*each) for each in shard.box)], 0
        )
        for shard in ids
    }
    tier = PersistentTier(f"gs://{_BUCKET}/ours")
    save = SaveId(step=step, incarnation="life", run_id="run")
    tier.write_tensors(save, tree, shards, (0,))
    tier.finish(save, {0: ("0" * 64, True)}, [leaf.spec for leaf in tree.leaves], {})


def _save_with_orbax(state: dict[str, Any], step: int) -> None:
    import orbax.checkpoint as ocp  # noqa: PLC0415

    with ocp.CheckpointManager(f"gs://{_BUCKET}/orbax") as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    sys.exit(main())
