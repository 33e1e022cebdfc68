"""Measure what the ways of writing a step to a disk are worth, in one process.

    python -m benchmarks.micro.disk_save [--storage DIR] [--mib 512] [--leaves 16] [--rounds 3]

Ways take turns, each with a step kept before the one that is written: plain files written and
synced by two threads; this package's persistent tier; the same without the pages of the step
before; plain Orbax with its defaults. Prints for each the median seconds, the CPU time, and how
many times as long it takes as the second.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.arguments import positive
from benchmarks.common.tables import markdown, number

_WRITERS = 2
_ROW = 4096
_OURS = "this tier"
_RELEASE = "emergency_ckpt.storage.item.array_writes.release_pages"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=positive, default=512)
    parser.add_argument("--leaves", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="eckpt-bench-") as folder:
        _measure(options, Path(folder))
    return 0


def _measure(options: argparse.Namespace, root: Path) -> None:
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    rows = max(1, options.mib * 2**20 // options.leaves // _ROW)
    random = np.random.default_rng(0)
    state = {
        f"leaf_{i:05}": jax.device_put(random.standard_normal((rows, 1024), dtype=np.float32))
        for i in range(options.leaves)
    }
    ways: dict[str, Callable[[int], object]] = {
        "plain files, synced": functools.partial(_write_files, root / "plain", state),
        _OURS: _tier(root / "ours", state),
        "the same, all pages new": _with_new_pages(_tier(root / "new", state)),
        "plain Orbax": _orbax(root / "orbax", state),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        for step in range(options.rounds + 1):  # the first has no step before it
            begun_s, begun_cpu_s = time.monotonic(), time.process_time()
            way(step)
            if step:
                seconds[name].append(time.monotonic() - begun_s)
                cpu[name].append(time.process_time() - begun_cpu_s)
        for each in root.iterdir():
            shutil.rmtree(each)
    ours = statistics.median(seconds[_OURS])
    table = [["", "seconds", "CPU, s", "over this tier"]]
    for name, found in seconds.items():
        taken = statistics.median(found)
        table.append([name, *map(number, (taken, statistics.median(cpu[name]), taken / ours))])
    print(f"{options.mib} MiB in {options.leaves} leaves, load {os.getloadavg()[0]:.1f}")
    print(markdown(table))


def _write_files(folder: Path, state: dict[str, Any], step: int) -> None:
    import numpy as np  # noqa: PLC0415

    target = folder / str(step)
    target.mkdir(parents=True)
    views = [memoryview(np.asarray(leaf)).cast("B") for leaf in state.values()]

    def write(number: int) -> None:
        with (target / str(number)).open("wb", buffering=0) as file:
            for view in views[number::_WRITERS]:
                left = view
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(_WRITERS)))
    shutil.rmtree(folder / str(step - 1), ignore_errors=True)


def _tier(folder: Path, state: dict[str, Any]) -> Callable[[int], object]:
    import numpy as np  # noqa: PLC0415

    from emergency_ckpt.state.staging import HostShard  # noqa: PLC0415
    from emergency_ckpt.state.tree import BoxTable, describe  # noqa: PLC0415
    from emergency_ckpt.storage import DirectoryWriter  # noqa: PLC0415
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
    tier = PersistentTier(str(folder))
    tier.create()
    life, leaves = f"{1:012d}-{'5e' * 8}", [leaf.spec for leaf in tree.leaves]
    writer = DirectoryWriter(tier.storage, tier.found, run_id="run", from_dir=False)

    def save(step: int) -> None:
        writer.begin(life)
        writer.make_room(step, "it is saved anew")
        save = SaveId(step=step, incarnation=life, run_id="run")
        tier.write_document(step, 0, 1, b"{}")
        tier.write_tensors(save, tree, shards, (0,))
        writer.publish(tier.finish(save, {0: ("0" * 64, True)}, leaves, {}), None)

    return save


def _with_new_pages(save: Callable[[int], object]) -> Callable[[int], object]:
    def save_with_new_pages(step: int) -> None:
        with mock.patch(_RELEASE, return_value=None):
            save(step)

    return save_with_new_pages


def _orbax(folder: Path, state: dict[str, Any]) -> Callable[[int], object]:
    import orbax.checkpoint as ocp  # noqa: PLC0415

    def save(step: int) -> None:
        with ocp.CheckpointManager(folder) as manager:
            manager.save(step, args=ocp.args.StandardSave(state))

    return save


if __name__ == "__main__":
    sys.exit(main())
