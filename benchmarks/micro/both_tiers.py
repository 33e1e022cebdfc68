"""Measure saves to RAM, to storage and to both from one device: stall, transfers, host memory.

    python -m benchmarks.micro.both_tiers [--mib 1024] [--leaves 32] [--saves 20] [--platform NAME]

Each way has a process of its own, so that no way meets the memory of another. Bytes from device to
host come from JAX's profiler, in a save after those that are timed; on CPU there are no transfers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, machine
from benchmarks.common.tables import markdown, number

_LOCAL, _BOTH, _STORAGE, _ORBAX = "RAM", "both tiers", "storage", "plain Orbax"
_WAITS = ", wait"
_WAYS = (_LOCAL, _BOTH, _STORAGE, _LOCAL + _WAITS, _BOTH + _WAITS, _STORAGE + _WAITS, _ORBAX)
_INTERVALS = {_LOCAL: (0, 1), _BOTH: (1, 1), _STORAGE: (1, 0)}
_TIMES = {"save": 1e3, "computed": 1e3, "ready": 1e3, "step": 1e3, "whole": 1}
"""Columns with times, and how many of their unit a second has."""
_WARM_UP = 3  # the first saves make slots, files and the plan
_STEPS_AHEAD = 4  # in the device's queue when a state is saved that is being computed
_SAMPLE_S = 0.005
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=arguments.positive, default=1024)
    parser.add_argument("--leaves", type=arguments.positive, default=32)
    parser.add_argument("--saves", type=arguments.positive, default=20)
    parser.add_argument("--platform", help="JAX's name of it; default: the one that JAX takes")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", choices=_WAYS, help="this way, and print JSON")
    options = parser.parse_args(argv)
    if options.only:
        print(json.dumps(_measure(options)))
        return 0
    given = [f"--{name}={value}" for name, value in vars(options).items() if value is not None]
    found = {way: _run_alone(way, given) for way in _WAYS}
    about = machine.facts() | {"device": found[_LOCAL]["device"]}
    print(json.dumps({"machine": about, "state_mib": options.mib, "ways": found}))
    print(markdown(table(found)))
    return 0


def _run_alone(way: str, given: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.micro.both_tiers", *given, f"--only={way}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from benchmarks.common import state as model  # noqa: PLC0415
    from benchmarks.common.contenders import ready_wait_s  # noqa: PLC0415

    if options.platform:
        jax.config.update("jax_platforms", options.platform)
    device = jax.local_devices()[0]
    items = options.mib * _MIB // 4 // options.leaves
    random = np.random.Generator(np.random.SFC64(0))
    state: Any = {
        f"leaf_{i:05}": jax.device_put(random.standard_normal(items, dtype=np.float32), device)
        for i in range(options.leaves)
    }
    rows: list[dict[str, float | None]] = []
    with (
        tempfile.TemporaryDirectory(dir=options.ramdisk, prefix="eckpt-bench-") as ramdisk,
        tempfile.TemporaryDirectory(dir=options.storage, prefix="eckpt-bench-") as storage,
    ):
        session = _session(options.only, state, Path(ramdisk), Path(storage))
        session.start_fresh()
        for step in range(1, 2 * (_WARM_UP + options.saves), 2):
            state = jax.block_until_ready(model.train_step(state))
            with _HostMemory() as memory:
                begun_s = time.perf_counter()
                session.save(step, state)
                saved_s = time.perf_counter()
                state = jax.block_until_ready(model.train_step(state))
                stepped_s = time.perf_counter()
                session.wait()
            whole_s = time.perf_counter() - begun_s
            row = {"save": saved_s - begun_s, "step": stepped_s - saved_s, "whole": whole_s}
            for _ in range(_STEPS_AHEAD):
                state = model.train_step(state)
            begun_s = time.perf_counter()
            session.save(step + 1, state)
            row["computed"] = time.perf_counter() - begun_s
            session.wait()
            rows.append(row | {"ready": ready_wait_s(session)} | memory.peaks)
        with tempfile.TemporaryDirectory() as trace:
            devices_only = jax.profiler.ProfileOptions()
            devices_only.python_tracer_level = devices_only.host_tracer_level = 0
            with jax.profiler.trace(trace, profiler_options=devices_only):
                session.save(step + 2, state)
                session.wait()
            from_device = _bytes_from_device(Path(trace))
        session.close()
    return {"rows": rows[_WARM_UP:], "from_device": from_device, "device": device.device_kind}


def _session(way: str, state: Any, ramdisk: Path, storage: Path) -> Any:
    import jax  # noqa: PLC0415

    from benchmarks.common.contenders.orbax_plain import PlainSession  # noqa: PLC0415
    from benchmarks.common.contenders.ours import OurSession  # noqa: PLC0415

    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    if way == _ORBAX:
        return PlainSession(storage, abstract, max_to_keep=1)
    to_storage, to_ram = _INTERVALS[way.removesuffix(_WAITS)]
    copies = 0 if way.endswith(_WAITS) else sum(leaf.nbytes for leaf in state.values())
    return OurSession(
        abstract,
        dir=str(storage),
        local_dir=str(ramdisk),
        run_id="both-tiers",
        save_every=to_storage,
        local_save_every=to_ram,
        keep_last_n=1,
        device_copy_bytes=copies,
        device_reads="pinned_host",
    )


class _HostMemory:
    """Peaks of this process's memory, and of what the machine gave away, sampled by a thread.

    ``anonymous`` and ``shared`` (slots on the ramdisk) are of the process. Pinned memory of a
    driver may be in neither: ``machine`` is the fall of MemAvailable, which page cache does not
    change, since the first sample.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._first_available = _kib("/proc/meminfo", "MemAvailable")
        self.peaks: dict[str, float] = {"anonymous": 0, "shared": 0, "machine": 0}

    def __enter__(self) -> _HostMemory:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            now = {
                "anonymous": _kib("/proc/self/status", "RssAnon"),
                "shared": _kib("/proc/self/status", "RssShmem"),
                "machine": self._first_available - _kib("/proc/meminfo", "MemAvailable"),
            }
            for name, kib in now.items():
                self.peaks[name] = max(self.peaks[name], kib * 1024)
            if self._ended.wait(_SAMPLE_S):
                return


def _kib(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {name}")


def _bytes_from_device(trace: Path) -> int:
    """Return the sizes of all copies from device to host of a profile."""
    import jax  # noqa: PLC0415

    total = 0
    for path in trace.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name == "MemcpyD2H":
                        details = str(dict(event.stats).get("memcpy_details", ""))
                        if size := re.search(r"\bsize:(\d+)", details):
                            total += int(size[1])
    return total


def table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return medians over the saves; of memory the largest of the first and of the second half."""
    table = [
        [
            "",
            "save, arrays ready, ms",
            "save, arrays being computed, ms",
            "of it, wait for them, ms",
            "step after it, ms",
            "whole, s",
            "bytes from device, MiB",
            "anonymous, MiB",
            "shared, MiB",
            "machine, MiB",
        ]
    ]
    for way, result in found.items():
        rows = result["rows"]
        middle = len(rows) // 2
        halves = (rows[:middle] or rows, rows[middle:])
        cells = [way]
        for name, scale in _TIMES.items():
            told = [row[name] for row in rows if row[name] is not None]
            cells.append(number(statistics.median(told) * scale) if told else "-")
        cells.append(number(result["from_device"] / _MIB))
        for name in ("anonymous", "shared", "machine"):
            peaks = [max(row[name] for row in half) / _MIB for half in halves]
            cells.append(", ".join(map(number, peaks)))
        table.append(cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
