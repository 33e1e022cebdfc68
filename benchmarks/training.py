"""Measure what a save costs training: a loop with saves less the same loop without.

    python -m benchmarks.training [--mib 6144] [--saves 6] [--every 15] [--ways ours,orbax]
    python -m benchmarks.training --slices 2

One process, one device: whatever JAX finds. The state is that of Adam and is donated by each step.
Of each way: the seconds that one save adds to the loop, the steps until the next save included; the
time inside ``save``; the time until one save alone is whole; a restore in the same process, with
the bits compared. Beside them the rate of the link. On a CPU the figures mean nothing.

With two slices each slice is a process with one device, and both hold the whole state. Orbax's
emergency manager takes the place of its ``CheckpointManager``. Each figure is that of the slower
process: Orbax keeps no copy in the RAM of the first slice. The steps have no collectives, so the
two processes may share a device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from benchmarks.common import contenders, machine, program, tables
from benchmarks.common.contenders import Session
from benchmarks.common.contenders.orbax_plain import plain_session
from benchmarks.common.contenders.ours import open_session as open_ours
from benchmarks.common.program import positive
from emergency_ckpt.state.link import find_link

State = dict[str, Any]
_BYTES_OF_A_WEIGHT = 3 * 4
"""Its value and Adam's two moments, in float32."""
_STEPS_AFTER = 10
"""Fewest steps from one save to the next, so that what it costs later is seen."""
OURS, WITHOUT_COPIES, ORBAX = "ours", "ours, no copies on the device", "orbax"
EMERGENCY = "orbax's emergency manager"
WAYS = {1: (OURS, WITHOUT_COPIES, ORBAX), 2: (OURS, WITHOUT_COPIES, EMERGENCY)}
"""The contenders, by the number of slices."""
_LOOPBACK = "127.0.0.1"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    about = machine.facts()
    with tempfile.TemporaryDirectory(dir=options.ramdisk, prefix="eckpt-training-") as place:
        measure = _result if options.slices == 1 else _result_of_slices
        result = measure(options, Path(place))
    program.publish(options, "training", about, _text(options, about, result), result)
    return 0


def _result(options: argparse.Namespace, place: Path, rank: int = 0) -> dict[str, Any]:
    """Measure every way in this process. Collective over the slices."""
    if options.slices > 1:
        _join(options, rank)
    device = jax.local_devices()[0]
    mesh = Mesh(np.array(jax.devices()).reshape(options.slices, 1), ("slice", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec())
    layers = max(1, round(options.mib * 2**20 / (_BYTES_OF_A_WEIGHT * options.width**2)))
    shape = (options.tokens, options.width)
    make_batch = jax.jit(
        lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), out_shardings=sharding
    )
    batch = make_batch()
    steps = options.saves * options.every
    state = _first_state(layers, options.width, sharding)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    state = _loop(state, batch, _STEPS_AFTER)[0]
    state, bare_s = _loop(state, batch, steps)
    rows: dict[str, Any] = {}
    for way in options.ways:
        session = _session(way, place / way.replace(" ", "-"), state, rank, mesh)
        try:
            state, rows[way] = _measure(session, state, batch, bare_s, options)
        finally:
            session.close()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "options": {key: str(value) for key, value in vars(options).items()},
        "state_bytes": nbytes,
        "seconds_of_a_step": bare_s / steps,
        "link_gb_per_s": _link_rates(state),
        "ways": rows,
    }


def _result_of_slices(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Measure in a process for each slice; return the result with the greater of two figures."""
    with socket.create_server((_LOOPBACK, 0)) as server:
        options.port = server.getsockname()[1]
    # Both processes may have to share the memory of one device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        first, second = pool.map(partial(_result, options, place), (0, 1))
    slower = partial(jax.tree.map, max)
    ways = {way: slower(row, second["ways"][way]) for way, row in first["ways"].items()}
    return {**first, "ways": ways}


def _join(options: argparse.Namespace, rank: int) -> None:
    """Start JAX as the process of one slice, with one device."""
    jax.config.update("jax_num_cpu_devices", 1)
    devices = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    jax.distributed.initialize(
        f"{_LOOPBACK}:{options.port}",
        options.slices,
        rank,
        local_device_ids=[rank % devices] if devices else None,
    )
    contenders.load("orbax-emergency").prepare()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = program.new_parser("training", __doc__)
    parser.add_argument("--mib", type=positive, default=6144)
    parser.add_argument("--width", type=positive, default=8192)
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--saves", type=positive, default=6)
    parser.add_argument("--every", type=positive, default=_STEPS_AFTER + 5)
    parser.add_argument("--slices", type=int, choices=sorted(WAYS), default=1)
    parser.add_argument("--ways", type=program.words, help="default: all")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    options = parser.parse_args(arguments)
    if options.every < _STEPS_AFTER:
        parser.error(f"--every must be {_STEPS_AFTER} or more: the steps after a save count")
    options.ways = options.ways or list(WAYS[options.slices])
    if not set(options.ways) <= set(WAYS[options.slices]):
        parser.error(f"the ways with --slices {options.slices}: {', '.join(WAYS[options.slices])}")
    return options


# The model.


def _first_state(layers: int, width: int, sharding: Sharding) -> State:
    @partial(jax.jit, out_shardings=sharding)
    def first() -> State:
        keys = jax.random.split(jax.random.key(0), layers)
        weights = {
            f"w{i:03}": jax.random.normal(keys[i], (width, width), jnp.float32) * 0.01
            for i in range(layers)
        }
        zeros = {name: jnp.zeros_like(weight) for name, weight in weights.items()}
        return {
            "weights": weights,
            "first": zeros,
            "second": jax.tree.map(jnp.zeros_like, zeros),
            "count": jnp.zeros((), jnp.int32),
        }

    return jax.block_until_ready(first())


def _loss(weights: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = batch
    for name in sorted(weights):
        hidden = hidden + jax.nn.gelu(hidden @ weights[name].astype(jnp.bfloat16))
    return jnp.mean(jnp.square(hidden.astype(jnp.float32)))


def _train(state: State, batch: jax.Array) -> State:
    gradients = jax.grad(_loss)(state["weights"], batch)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-8), state["weights"], first, second
    )
    return {"weights": weights, "first": first, "second": second, "count": state["count"] + 1}


_step = jax.jit(_train, donate_argnums=0)


@jax.jit
def _digests(state: State) -> list[jax.Array]:
    """One number of the bits of each leaf: moving all to the host would take longer than a save."""

    def digest(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
        return jnp.sum(bits * (jnp.arange(bits.size, dtype=jnp.uint32) * 2 + 1), dtype=jnp.uint32)

    return [digest(leaf) for leaf in jax.tree.leaves(state)]


def _loop(
    state: State, batch: jax.Array, steps: int, after: Callable[[int, State], None] | None = None
) -> tuple[State, float]:
    """Run ``steps`` steps; return the state after them and the seconds that they took."""
    began_s = time.perf_counter()
    for number in range(steps):
        state = _step(state, batch)
        if after is not None:
            after(number, state)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began_s


# The measurement.


def _session(way: str, place: Path, state: State, rank: int, mesh: Mesh) -> Session:
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    local_dir, persistent_dir = place / f"ram-{rank}", place / "storage"
    local_dir.mkdir(mode=0o700, parents=True)
    persistent_dir.mkdir(exist_ok=True)
    if way == ORBAX:
        return plain_session(local_dir, abstract, max_to_keep=1)
    site = contenders.Site(mesh, 0, abstract, contenders.RAM, local_dir, persistent_dir, _LOOPBACK)
    if way == EMERGENCY:
        return contenders.load("orbax-emergency").open_session(site)
    copies = {"device_copy_bytes": 0} if way == WITHOUT_COPIES else {}
    return open_ours(site, **copies)


def _measure(
    session: Session, state: State, batch: jax.Array, bare_s: float, options: argparse.Namespace
) -> tuple[State, dict[str, Any]]:
    session.start_fresh()
    step, whole_s, stalls_s = 0, [], []

    def save(state: State) -> float:
        """Return the seconds inside ``save``."""
        nonlocal step
        step += 1
        jax.block_until_ready(state)  # so that the time inside is not that of the step before
        began_s = time.perf_counter()
        session.save(step, state)
        return time.perf_counter() - began_s

    for _ in range(4):  # the first is the first of a life; copies begin after a whole interval
        began_s = time.perf_counter()
        save(state)
        session.wait()
        whole_s.append(time.perf_counter() - began_s)
        state = _loop(state, batch, 1)[0]

    def after(number: int, state: State) -> None:
        if number % options.every == 0:
            stalls_s.append(save(state))

    state, seconds = _loop(state, batch, options.saves * options.every, after)
    session.wait()
    save(state)
    session.wait()
    want = [int(each) for each in _digests(state)]
    began_s = time.perf_counter()
    found, restored = session.newest()
    jax.block_until_ready(restored)
    restore_s = time.perf_counter() - began_s
    if found != step or [int(each) for each in _digests(restored)] != want:
        raise RuntimeError("what was restored is not what was saved")
    return restored, {
        "lost_per_save": (seconds - bare_s) / options.saves,
        "inside_save": stalls_s,
        "until_whole": whole_s[1:],
        "first_until_whole": whole_s[0],
        "restore": restore_s,
    }


def _link_rates(state: State) -> dict[str, float]:
    """Return the GB/s of the link: as our probe found it, and by JAX's transfer on a GPU."""
    facts = find_link().facts
    rates = {f"probe ({facts.way})": facts.gb_s} if facts.gb_s else {}
    arrays = jax.tree.leaves(state["weights"])
    if facts.platform != "gpu":
        return rates
    pinned = arrays[0].sharding.with_memory_kind("pinned_host")
    jax.block_until_ready(jax.device_put(arrays, pinned))  # makes the memory
    began_s = time.perf_counter()
    jax.block_until_ready(jax.device_put(arrays, pinned))
    seconds = time.perf_counter() - began_s
    rates["JAX into pinned memory"] = sum(array.nbytes for array in arrays) / 1e9 / seconds
    return rates


# The report.


def _text(options: argparse.Namespace, about: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    slices = " in each of two slices" if options.slices > 1 else ""
    rows = [["ms", "lost per save", "inside save", "until whole", "the first", "restore"]]
    for way, row in result["ways"].items():
        seconds = [
            row["lost_per_save"],
            statistics.median(row["inside_save"]),
            statistics.median(row["until_whole"]),
            row["first_until_whole"],
            row["restore"],
        ]
        rows.append([way, *(f"{value * 1e3:.1f}" for value in seconds)])
    lines = [
        f"{result['state_bytes'] / 1e9:.3g} GB of state on one {result['device']}"
        f" ({result['platform']}){slices}, jax {jax.__version__}; {machine.text(about)};"
        f" a step takes {result['seconds_of_a_step'] * 1e3:.1f} ms",
        "",
        *(f"link, {name}: {rate:.1f} GB/s" for name, rate in result["link_gb_per_s"].items()),
        tables.markdown(rows),
    ]
    if result["platform"] == "cpu":
        lines += ["", "On a CPU there is no device to copy from: these figures mean nothing."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
