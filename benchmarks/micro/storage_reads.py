"""Measure what reading the chunks of a stored step from its files is worth, in one process.

    python -m benchmarks.micro.storage_reads [--storage DIR] [--mib 512] [--leaves 16] [--rounds 5]

Ways take turns, each into the same memory, whose pages are there: this package's reader, which
reads the files of the database itself; TensorStore, which copies each array straight into that
memory, all at once, with a CRC32C of each array after it; the same without the CRC32C. Prints for
each the median seconds, the CPU time, and how many times as long it takes as the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import positive
from benchmarks.common.tables import markdown, number

_ROW = 4096
_LIMIT_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=positive, default=512)
    parser.add_argument("--leaves", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="eckpt-bench-") as folder:
        _measure(options, Path(folder))
    return 0


class _Memory:
    """The sink of this package's reader."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))

    def write(self, data: memoryview, offset: int) -> None:
        self.view[offset : offset + data.nbytes] = data.cast("B")


def _measure(options: argparse.Namespace, root: Path) -> None:
    rows = max(1, options.mib * 2**20 // options.leaves // _ROW)
    item = _written(root, options.leaves, rows)
    memory = _Memory(options.leaves * rows * _ROW)
    ways: dict[str, Callable[[], list[int]]] = {
        "this reader": lambda: _by_files(item, options.leaves, memory),
        "TensorStore into the memory": lambda: _by_tensorstore(item, options.leaves, memory),
        "the same, no CRC32C": lambda: _by_tensorstore(item, options.leaves, memory, crc=False),
    }
    want = ways["this reader"]()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            memory.view[:] = bytes(len(memory.view))
            begun_s, begun_cpu_s = time.monotonic(), time.process_time()
            crcs = way()
            seconds[name].append(time.monotonic() - begun_s)
            cpu[name].append(time.process_time() - begun_cpu_s)
            if crcs and crcs != want:
                raise RuntimeError(f"{name} read other bytes")
    first = statistics.median(seconds["this reader"])
    table = [["", "seconds", "CPU, s", "over this reader"]]
    for name, taken in seconds.items():
        median_s = statistics.median(taken)
        cells = (median_s, statistics.median(cpu[name]), median_s / first)
        table.append([name, *map(number, cells)])
    print(f"{options.mib} MiB in {options.leaves} leaves, load {os.getloadavg()[0]:.1f}")
    print(markdown(table))


def _written(root: Path, leaves: int, rows: int) -> str:
    """Write a step by this package's persistent tier; return the folder of its arrays."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from emergency_ckpt import EmergencyCheckpointer  # noqa: PLC0415

    random = np.random.default_rng(0)
    state = {
        _name(i): jax.device_put(random.standard_normal((rows, 1024), dtype=np.float32))
        for i in range(leaves)
    }
    config = EmergencyCheckpointer.default_config().set(
        dir=str(root / "storage"), save_every=1, local_save_every=0
    )
    with config.instantiate() as checkpointer:
        checkpointer.save(step=1, state=state)
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
    return str(root / "storage" / "1" / "state")


def _name(number: int) -> str:
    return f"leaf_{number:05}"


def _by_files(item: str, leaves: int, memory: _Memory) -> list[int]:
    from etils import epath  # noqa: PLC0415

    from emergency_ckpt.storage.orbax_reader import BoxReader, open_by_name  # noqa: PLC0415
    from emergency_ckpt.types import ShardId  # noqa: PLC0415
    from emergency_ckpt.work_progress import WorkProgress  # noqa: PLC0415

    names = [_name(i) for i in range(leaves)]
    found = open_by_name(epath.Path(item), names, time.monotonic() + _LIMIT_S)
    assert found is not None
    arrays = {name: leaf.array for name, leaf in found.items()}
    progress = WorkProgress.until(time.monotonic() + _LIMIT_S)
    reader = BoxReader(item, arrays, complete=True, buffer_bytes=256 << 20, progress=progress)
    each = len(memory.view) // leaves
    whole = [ShardId(name, tuple((0, size) for size in arrays[name].shape)) for name in names]
    return reader.read_into(memory, [(shard, i * each) for i, shard in enumerate(whole)])


def _by_tensorstore(item: str, leaves: int, memory: _Memory, *, crc: bool = True) -> list[int]:
    import numpy as np  # noqa: PLC0415
    import tensorstore  # noqa: PLC0415

    from emergency_ckpt import _native  # noqa: PLC0415

    cores = len(os.sched_getaffinity(0))
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": cores},
            "file_io_concurrency": {"limit": 32},
        }
    )
    each = len(memory.view) // leaves
    parts = [memory.view[i * each : (i + 1) * each] for i in range(leaves)]

    def spec(name: str) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{item}/"}
        return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}

    opened = [tensorstore.open(spec(_name(i)), context=context, open=True) for i in range(leaves)]
    copies = []
    for part, future in zip(parts, opened, strict=True):
        store = future.result()
        array = np.frombuffer(part, store.dtype.numpy_dtype).reshape(store.shape)
        copies.append(tensorstore.array(array, context=context).write(store))
    with ThreadPoolExecutor(cores) as pool:

        def finish(number: int) -> int:
            copies[number].result()
            return _native.crc32c(parts[number]) if crc else 0

        crcs = list(pool.map(finish, range(leaves)))
    return crcs if crc else []


if __name__ == "__main__":
    sys.exit(main())
