"""States whose every element follows from the step, and jobs of real processes that save them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from buffered import with_buffers
from configs import config_with
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_coordination import meet
from running_jobs import PASSED_VARIABLE, results_path

from emergency_ckpt import CheckpointerConfig, EmergencyCheckpointer
from emergency_ckpt.cluster import Coordinator
from emergency_ckpt.cluster.coordination import connect
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.events import point_of
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

_OUT_TIMEOUT_S = 200.0
LEAVES: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "embed": ((32, 16), "float32", P("fsdp")),
    "columns": ((8, 16), "bfloat16", P(None, "fsdp")),
    "replicated": ((5, 3), "float16", P()),
    "scalar": ((), "float32", P()),
    "empty": ((0, 4), "float32", P()),
    "flags": ((16,), "bool", P("fsdp")),
    "bytes": ((16, 2), "int8", P("fsdp")),
    "nibbles": ((16,), "int4", P("fsdp")),
    "eights": ((16, 4), "float8_e4m3fn", P("fsdp")),
    "wide": ((8,), "uint32", P()),
    "complex": ((4, 2), "complex64", P("fsdp")),
}


def mesh_of(slices: int, order: list[int] | None = None) -> Mesh:
    """(slice, fsdp) over all devices; ``order`` rearranges the slices."""
    devices = np.array(jax.devices()).reshape(slices, -1)
    if order is not None:
        devices = devices[order]
    return Mesh(devices, ("slice", "fsdp"))


def expected_leaf(name: str, step: int) -> np.ndarray:
    """The whole array ``name`` at ``step``: random bits, so NaN payloads and -0.0 occur."""
    shape, dtype, _ = LEAVES[name]
    seed = [step, *name.encode()]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    if dtype == "bool":
        bits &= 1
    if dtype == "int4":  # one value a byte, sign-extended as ml_dtypes keeps it
        return (bits.astype(np.int8) % 8).astype(kind).reshape(shape)
    values = bits.view(kind).reshape(shape).copy()
    if dtype == "float32" and count > 3:
        values.reshape(-1)[:2] = [np.float32(-0.0), np.float32("nan")]
    return values


def state_at(step: int, mesh: Mesh) -> dict[str, Any]:
    """The training state at ``step``, placed on ``mesh``."""
    state: dict[str, Any] = {}
    for name, (_, _, spec) in LEAVES.items():
        whole = expected_leaf(name, step)
        sharding = NamedSharding(mesh, spec)
        state[name] = jax.make_array_from_callback(
            whole.shape, sharding, lambda index, whole=whole: whole[index]
        )
    keys = jax.random.key_data(jax.random.split(jax.random.key(step), 4))
    keys = np.asarray(keys)
    data = jax.make_array_from_callback(
        keys.shape, NamedSharding(mesh, P()), lambda index: keys[index]
    )
    state["keys"] = jax.random.wrap_key_data(data)
    state["host"] = {"count": step, "rate": 0.5 * step, "numpy": np.arange(3) + step}
    return state


def specs_on(mesh: Mesh) -> dict[str, Any]:
    """What a trainer passes to ``restore``: specs for arrays, values for the rest."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state_at(0, mesh),
    )


def differences(state: dict[str, Any], step: int, mesh: Mesh) -> list[str]:
    """Leaves of this process that are not, bit for bit, those of ``step``."""
    wrong: list[str] = []
    wanted = state_at(step, mesh)
    for path, (mine, right) in zip(
        (jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(wanted)),
        zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True),
        strict=True,
    ):
        if isinstance(right, jax.Array):
            if mine.sharding != right.sharding or mine.dtype != right.dtype:
                wrong.append(f"{path}: {mine.dtype} {mine.sharding}")
                continue
            if jax.dtypes.issubdtype(right.dtype, jax.dtypes.prng_key):
                pair = jax.random.key_data(mine), jax.random.key_data(right)
            else:
                pair = mine, right
            shards = (array.addressable_shards for array in pair)
            for a, b in zip(*shards, strict=True):
                if a.index != b.index or _bits(a.data) != _bits(b.data):
                    wrong.append(f"{path}{a.index}")
        elif type(mine) is not type(right) or not np.array_equal(mine, right):
            wrong.append(f"{path}: {mine!r}")
    return wrong


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


class Iterator:
    """A data iterator as trainers have them: its state is bytes and moves with each batch."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.position = 0

    def get_state(self) -> bytes:
        return json.dumps([self.process, self.position]).encode()

    def set_state(self, state: bytes) -> None:
        self.process, self.position = json.loads(state)

    def at(self, step: int) -> Iterator:
        self.position = 100 * step + self.process
        return self

    def is_at(self, step: int, process: int) -> bool:
        return (self.process, self.position) == (process, 100 * step + process)


class _AsBeforeACrash(CheckpointerConfig):
    """Of checkpointers whose end leaves storage without RAM's newest step."""

    def instantiate(self) -> EmergencyCheckpointer:
        return with_buffers(Buffers(), stores_newest=False)(self)


@dataclasses.dataclass
class JobProcess:
    """One process of a real job, and the directories that stand for the hosts' ramdisks."""

    root: Path
    process: int
    count: int
    slices: int
    meeting: Coordinator
    events: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    program: str = ""
    meetings: int = 0
    meet_timeout_s: float = 60.0

    def begin(self, program: str) -> None:
        """Forget the program before: its events, and the meetings that this process missed."""
        self.program = program
        self.meetings = 0
        self.events.clear()

    def meet(self) -> None:
        """Wait for all processes: what one does to the disks, the others see afterwards."""
        self.meetings += 1
        meet(self.meeting, f"meet/{self.program}/{self.meetings}", self.meet_timeout_s)

    def ramdisk(self, name: str, host: int | None = None) -> Path:
        return self.root / name / f"host_{self.process if host is None else host}"

    def config(
        self, name: str, *, host: int | None = None, stores_newest: bool = False, **settings: Any
    ) -> CheckpointerConfig:
        """Return a config. Most jobs want storage as a crash leaves it, as ``World.open``."""
        kind = CheckpointerConfig if stores_newest else _AsBeforeACrash
        defaults: dict[str, Any] = {
            "run_id": name,
            "local_dir": str(self.ramdisk(name, host)),
            "local_save_every": 5,
            "save_every": 0,
            "total_timeout_s": 60,
            "start_timeout_s": 120,
            "save_timeout_s": 30,
            "transfer_timeout_s": 30,
            "storage_wait_timeout_s": 60,
            "on_event": lambda event: self.events.append((event.name, dict(event.fields))),
        }
        return config_with({**defaults, **settings}, kind)

    def named(self, point: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if point_of(name, fields) == point]


def finish(ckpt: EmergencyCheckpointer) -> None:
    """Wait for all that is being saved; raise what failed."""
    ckpt.wait_until_finished()
    ckpt.check_for_errors()


Program = Callable[[JobProcess], Any]


def programs_of(module: dict[str, Any]) -> dict[str, Program]:
    """Return what a module defines with ``world`` as the only parameter, by name, in its order.

    Names that begin with ``_`` are parts of others.
    """
    return {
        name: value
        for name, value in module.items()
        if inspect.isfunction(value) and value.__module__ == module["__name__"]
        if not name.startswith("_") and list(inspect.signature(value).parameters) == ["world"]
    }


def run_program(programs: dict[str, Program]) -> None:
    """Run every program in this process; write what each returned, or its error, as JSON.

    Written before and after each program, so that those before a crash have their outcomes.
    """
    root, slices = Path(sys.argv[1]), int(sys.argv[2])
    passed = json.loads(os.environ.get(PASSED_VARIABLE, "[]"))
    names = [name for name in sys.argv[3:] or list(programs) if name not in passed]
    env = JobEnvironment.from_environ()
    initialize_job(env)
    world = JobProcess(root, env.process_index, env.process_count, slices, connect("meeting"))
    out = results_path(root, env.restart_count, env.process_index)
    results: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        world.begin(name)
        results[name] = {"error": "the process ended in it"}
        _write(out, results)
        try:
            results[name] = {"value": programs[name](world)}
        except Exception as error:  # noqa: BLE001 - judged by the test, with its trace in the log
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        _write(out, results)
        # Where one process raised, the others come out of the program at their deadlines.
        meet(world.meeting, f"out/{name}", _OUT_TIMEOUT_S)
    _write(out, results)
    meet(world.meeting, "end", _OUT_TIMEOUT_S)


def _write(path: Path, results: dict[str, Any]) -> None:
    # Jobs that run at the same time may have the same directory.
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(results))
    os.replace(temporary, path)
