"""Measure the rate of snapshots from device to host, and the stall of training.

    python -m benchmarks.micro.device_to_host [--mib 1024] [--leaves 32] [--rounds 5]

Needs a machine with an accelerator; on CPU it only shows that it runs. One process, one device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.common import arguments, machine
from benchmarks.common import state as model
from benchmarks.common.contenders import Session, ready_wait_s, restore
from benchmarks.common.contenders.orbax_plain import PlainSession
from benchmarks.common.contenders.ours import OurSession
from benchmarks.micro.cuda_copy import CudaMissing, PinnedCopy
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import Buffers, StagingMemory
from emergency_ckpt.state.snapshot import SnapshotRecipe
from emergency_ckpt.state.tree import BoxTable, describe

PyTree = Any
WAIT, DEVICE_COPY, ORBAX = "ours, wait", "ours, device_copy", "orbax, async"
PLAIN, DEVICE_PUT, OWN_WAY = "cudaMemcpy, pinned", "jax.device_put, pinned", "jax, pageable"
STAGED, AT_ONCE = "snapshot, staged", "snapshot, all at once"
STALL, COMPUTED, READY = "save, arrays ready", "save, arrays being computed", "of it, wait for them"
_READ_BYTES = 1 << 30
_STEPS_AHEAD = 4


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.platform:
        jax.config.update("jax_platforms", options.platform)
    device = jax.local_devices()[0]
    about = machine.facts() | {"device": device.device_kind, "platform": device.platform}
    state = _first_state(device, options)
    nbytes = sum(leaf.nbytes for leaf in state.values())
    state, rates, absent = _bandwidth(state, device, options)
    with tempfile.TemporaryDirectory(dir=options.ramdisk, prefix="eckpt-d2h-") as ramdisk:
        stalls = _stalls(state, Path(ramdisk), options)
    result = {
        "machine": about,
        "options": {key: str(value) for key, value in vars(options).items()},
        "state_bytes": nbytes,
        "bandwidth_gb_per_s": rates,
        "absent": absent,
        "seconds": stalls,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "device_to_host.json").write_text(json.dumps(result, indent=2))
    print(_text(result))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--mib", type=arguments.positive, default=1024, help="size of the state")
    add("--leaves", type=arguments.positive, default=32)
    add("--rounds", type=arguments.positive, default=5, help="rounds after the warm-up")
    add("--staging-mib", type=arguments.positive, default=256)
    add("--device-copy-mib", type=arguments.positive, help="device memory; default: the state's")
    add("--platform", help="JAX's name of it; default: the one that JAX takes")
    add("--ramdisk", type=Path, default=Path("/dev/shm"), help="a tmpfs, for all contenders")
    add("--out", type=Path, default=Path("bench_out"))
    options = parser.parse_args(argv)
    options.device_copy_mib = options.device_copy_mib or options.mib
    if options.mib * 2**20 < 4 * options.leaves:
        parser.error("a leaf must have at least one value")
    return options


def _first_state(device: jax.Device, options: argparse.Namespace) -> PyTree:
    items = options.mib * 2**20 // 4 // options.leaves
    random = np.random.Generator(np.random.SFC64(0))
    return {
        f"leaf_{i:05}": jax.device_put(random.standard_normal(items, dtype=np.float32), device)
        for i in range(options.leaves)
    }


def _next(state: PyTree) -> PyTree:
    return jax.block_until_ready(model.train_step(state))


# Bandwidth.


def _bandwidth(
    state: PyTree, device: jax.Device, options: argparse.Namespace
) -> tuple[PyTree, dict[str, list[float]], dict[str, str]]:
    """Return the last state, GB/s (1e9 bytes) of every round by method, and reasons for absences.

    Each round reads new values, because JAX caches the values of arrays that it has read.
    """
    nbytes = sum(leaf.nbytes for leaf in state.values())
    pinned = "pinned_host" in {memory.kind for memory in device.addressable_memories()}
    memory: StagingMemory = "pinned_host" if pinned else "pageable"
    recipe = _recipe(state, Buffers(options.staging_mib << 20, memory))
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[PyTree], None]] = {}
        if device.platform == "cpu":
            absent[PLAIN] = "no GPU"
        else:
            try:
                copier = stack.enter_context(PinnedCopy(nbytes, device.local_hardware_id or 0))
                ways[PLAIN] = lambda state: copier.copy(list(state.values()))
            except CudaMissing as missing:
                absent[PLAIN] = str(missing)
        if pinned:
            ways[DEVICE_PUT] = _put_pinned
        else:
            absent[DEVICE_PUT] = "the device has no pinned host memory"
        ways[OWN_WAY] = _copy_jax_own_way
        ways[STAGED] = lambda state: _read(recipe, state, everything=False)
        ways[AT_ONCE] = lambda state: _read(recipe, state, everything=True)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(1 + options.rounds):
            for name, way in _rotated(ways, number):
                state = _next(state)
                started_s = time.perf_counter()
                way(state)
                seconds = time.perf_counter() - started_s
                if number:
                    rates[name].append(nbytes / seconds / 1e9)
    return state, rates, absent


def _put_pinned(state: PyTree) -> None:
    shardings = {
        name: leaf.sharding.with_memory_kind("pinned_host") for name, leaf in state.items()
    }
    jax.block_until_ready(jax.device_put(state, shardings, may_alias=False))


def _copy_jax_own_way(state: PyTree) -> None:
    for leaf in state.values():
        leaf.copy_to_host_async()
    for leaf in state.values():
        np.asarray(leaf)


def _recipe(state: PyTree, buffers: Buffers) -> SnapshotRecipe:
    tree = describe(state, "save")
    return SnapshotRecipe(
        tree, BoxTable(tree, 1).shards_of(0), Config(snapshot_mode="wait"), buffers
    )


def _read(recipe: SnapshotRecipe, state: PyTree, *, everything: bool) -> None:
    with contextlib.closing(recipe.take(jax.tree_util.tree_leaves(state))) as snapshot:
        snapshot.start(everything=everything)
        for _ in snapshot.batches(_READ_BYTES):
            pass


def _rotated(ways: Mapping[str, Any], by: int) -> Iterator[tuple[str, Any]]:
    names = list(ways)
    turn = by % len(names)
    for name in names[turn:] + names[:turn]:
        yield name, ways[name]


# Stall.


def _ours(ramdisk: Path, abstract: PyTree, buffers: Buffers, **settings: Any) -> Session:
    return OurSession(
        abstract,
        buffers,
        local_dir=str(ramdisk),
        run_id="device-to-host",
        save_every=0,
        local_save_every=1,
        **settings,
    )


def _stalls(
    state: PyTree, ramdisk: Path, options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every round by contender and row, without those it does not tell.

    RuntimeError when the state restored at the end differs from the saved one.
    """
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    is_cpu = next(iter(state.values())).sharding.device_set.pop().platform == "cpu"
    # Else there is no transfer to look at on CPU.
    staging = Buffers(options.staging_mib << 20, "pinned_host" if is_cpu else "auto")
    copying = {"device_copy_bytes": options.device_copy_mib << 20}
    places = {name: ramdisk / name.replace(", ", "-") for name in (WAIT, DEVICE_COPY, ORBAX)}
    for place in places.values():
        place.mkdir()
    with contextlib.ExitStack() as stack:
        sessions: dict[str, Session] = {
            WAIT: _ours(places[WAIT], abstract, staging, snapshot_mode="wait"),
            DEVICE_COPY: _ours(
                places[DEVICE_COPY], abstract, staging, snapshot_mode="device_copy", **copying
            ),
            # Its emergency manager needs a second slice.
            ORBAX: PlainSession(places[ORBAX], abstract, max_to_keep=1),
        }
        for session in sessions.values():
            stack.callback(session.close)
            session.start_fresh()
        seconds: dict[str, dict[str, list[float]]] = {
            name: collections.defaultdict(list) for name in sessions
        }
        saved: dict[str, Mapping[str, str]] = {}
        for number in range(1 + options.rounds):
            for name, session in _rotated(sessions, number):
                computed, state = _computed_save(session, 2 * number + 1, state)
                saved[name] = model.digests(state)
                times, state = _one_save(session, 2 * number + 2, state)
                for row, value in (times | computed).items() if number else ():
                    seconds[name][row].append(value)
        for name, session in sessions.items():
            if model.digests(restore(session, 2 * options.rounds + 2)) != saved[name]:
                raise RuntimeError(f"{name}: what was restored is not what was saved")
    return seconds


def _one_save(session: Session, step: int, state: PyTree) -> tuple[dict[str, float], PyTree]:
    state_ready_s = time.perf_counter()
    session.save(step, state)
    saved_s = time.perf_counter()
    state = _next(state)
    stepped_s = time.perf_counter()
    session.wait()
    whole_s = time.perf_counter()
    return {
        STALL: saved_s - state_ready_s,
        "step after it": stepped_s - saved_s,
        "until whole": whole_s - state_ready_s,
    }, state


def _computed_save(session: Session, step: int, state: PyTree) -> tuple[dict[str, float], PyTree]:
    for _ in range(_STEPS_AHEAD):
        state = model.train_step(state)
    begun_s = time.perf_counter()
    session.save(step, state)
    times = {COMPUTED: time.perf_counter() - begun_s}
    session.wait()
    if (ready_s := ready_wait_s(session)) is not None:
        times[READY] = ready_s
    return times, _next(state)


# The report.


def _text(result: Mapping[str, Any]) -> str:
    about, mib = result["machine"], result["state_bytes"] / 2**20
    lines = [
        f"{mib:g} MiB of state on one {about['device']} ({about['platform']});"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        "device to host                  GB/s, median (least - most)",
    ]
    lines += [
        f"  {name:<28}  {_spread(rates, 1, 'GB/s')}"
        for name, rates in result["bandwidth_gb_per_s"].items()
    ]
    lines += [f"  {name:<28}  - ({reason})" for name, reason in result["absent"].items()]
    for row in next(iter(result["seconds"].values())):
        lines += ["", f"{row:<30}  ms, median (least - most)"]
        lines += [
            f"  {name:<28}  {_spread(rows[row], 1e3, 'ms') if row in rows else '- (not told)'}"
            for name, rows in result["seconds"].items()
        ]
    if about["platform"] == "cpu":
        lines += ["", "On a CPU there is no device to copy from: these figures mean nothing."]
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        lines += ["", f"Not an idle machine (load average {load:.1f} at start): do not publish."]
    return "\n".join(lines)


def _spread(values: Sequence[float], scale: float, unit: str) -> str:
    scaled = sorted(value * scale for value in values)
    return f"{statistics.median(scaled):.2f} {unit} ({scaled[0]:.2f} - {scaled[-1]:.2f})"


if __name__ == "__main__":
    sys.exit(main())
