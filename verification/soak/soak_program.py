"""One process of a soak's job: restores, trains, saves, and notes what it sees in its journal.

It is a fork of the soak's process, which has imported everything and started no thread, so that a
life costs a fraction of a second. The journal is a file, which a SIGKILL leaves as it is.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from configs import config_with
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from soak_truth import LEAVES, box_text, digest, kind_of, leaf, position

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.events import Event

FOREVER = 400
_RESET_WINDOW_S = 20.0


class KillAt(NamedTuple):
    """An event, and how often it must have happened. ``in_restore``: it counts from the start."""

    event: str
    times: int
    in_restore: bool


@dataclasses.dataclass(frozen=True)
class Order:
    """What one process of one life is to do.

    Attributes:
      address: of JAX's coordination service.
      life: number of this life in its job; part of every state that it computes.
      settled: a file that exists once all processes have restored. The faults of the life itself
        wait for it: the end of one process before that is a failed restore of the others.
      steps: how many steps it trains. It goes on until it is killed, unless ``ends``.
      kill_at: the event at which it kills itself.
      raises_after: steps of a settled life after which the training loop raises, or -1.
      clock_s, clock_jump: its clock is wrong by these seconds, and after a step by some more.
      goes_on_after: it does not restore, and goes on after this step.
      put_back: names of known defects, see ``PUT_BACK``.
      resets: how many connections it breaks while it restores.
    """

    address: str
    process: int
    count: int
    slices: int
    devices: int
    life: int
    journal: Path
    settled: Path
    settings: Mapping[str, Any]
    steps: int
    ends: bool = False
    kill_at: KillAt | None = None
    raises_after: int = -1
    clock_s: float = 0.0
    clock_jump: tuple[int, float] | None = None
    goes_on_after: int | None = None
    put_back: tuple[str, ...] = ()
    resets: int = 0
    chance: float = 0.0
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Journal:
    """Lines of JSON, each written by one call."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._clock = time.monotonic

    def note(self, name: str, **fields: Any) -> None:
        line = {"t": round(self._clock(), 4), "e": name, **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Clock:
    """Python's wall clock, wrong by some seconds. Times of files are the kernel's."""

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + self.offset_s
        time.time_ns = lambda: now_ns() + int(self.offset_s * 1e9)


def _order_by_clock() -> None:
    """Number lives by the clock of the process that begins them, whatever came before."""
    from emergency_ckpt.core import timeline  # noqa: PLC0415 - in a fork

    real = timeline.new_incarnation

    def new_incarnation(greatest: int, nonce: str) -> str:
        del greatest
        return f"{int(time.time() * 100):012d}-{nonce}"

    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("emergency_ckpt.") and vars(module).get("new_incarnation") is real:
            vars(module)["new_incarnation"] = new_incarnation


PUT_BACK = {"order_by_clock": _order_by_clock}
"""Known defects, by name: the soak must find them (``--put-back``)."""


class Listener:
    """Notes each event, and kills this process at one of them."""

    def __init__(self, journal: Journal, kill_at: KillAt | None, settled: Path) -> None:
        self._journal, self._kill_at, self._settled = journal, kill_at, settled
        self._seen = 0

    def __call__(self, event: Event) -> None:
        fields = {
            k: event.fields[k] for k in ("step", "tier", "copies", "reason") if k in event.fields
        }
        self._journal.note(event.name, inc=event.origin.incarnation, **fields)
        if self._is_last(event.point):
            self._journal.note("killed_itself", at=event.point)
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_last(self, point: str) -> bool:
        kill_at = self._kill_at
        if kill_at is None or kill_at.event != point:
            return False
        if not kill_at.in_restore and not self._settled.exists():
            return False
        self._seen += 1
        return self._seen == kill_at.times


class Data:
    """The data iterator."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def get_state(self) -> list[int]:
        return self.at

    def set_state(self, state: list[int]) -> None:
        self.at = list(state)


def remap(former: Sequence[Any], process: int, count: int) -> Any:
    """The data of a job of another size: see ``soak_truth.expected_position``."""
    del count
    return former[process % len(former)]


def reset_connections(order: Order, stop: threading.Event) -> None:
    """Break connections to peers at random moments; not those to the coordination or a bucket."""
    chance = random.Random(order.chance)
    kept = {int(order.address.rpartition(":")[2])}
    kept |= {
        int(value.rpartition(":")[2]) for name, value in order.environ.items() if "URL" in name
    }
    left, deadline_s = order.resets, time.monotonic() + _RESET_WINDOW_S
    while left and not stop.wait(0.001) and time.monotonic() < deadline_s:
        for name in os.listdir("/proc/self/fd"):
            if left and chance.random() < 0.3 and _reset(int(name), kept):
                left -= 1


def _reset(number: int, kept: set[int]) -> bool:
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(number)) as connection:
            if connection.family != socket.AF_INET:
                return False
            if {connection.getpeername()[1], connection.getsockname()[1]} & kept:
                return False
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # it was closed meanwhile, or is none that can be broken


def mesh_of(slices: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(slices, -1), ("slice", "fsdp"))


def _sharding(name: str, mesh: Mesh) -> NamedSharding:
    axis = LEAVES[name].axis
    spec = [None] * len(LEAVES[name].shape) if axis is None else [None] * axis + ["fsdp"]
    return NamedSharding(mesh, P(*spec))


def state_at(step: int, life: int, mesh: Mesh) -> dict[str, jax.Array]:
    return {
        name: jax.make_array_from_callback(
            LEAVES[name].shape,
            _sharding(name, mesh),
            lambda index, name=name: leaf(name, step, life)[index],
        )
        for name in LEAVES
    }


def specs(mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(
            LEAVES[name].shape, kind_of(name), sharding=_sharding(name, mesh)
        )
        for name in LEAVES
    }


def seen(state: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The digest of what this process has of a state, with the boxes that it is of."""
    parts: dict[str, dict[str, bytes]] = {}
    for name, array in state.items():
        for shard in array.addressable_shards:
            box = tuple(
                (side.start or 0, size if side.stop is None else side.stop)
                for side, size in zip(shard.index, array.shape, strict=True)
            )
            parts.setdefault(name, {})[box_text(box)] = np.asarray(shard.data).tobytes()
    return {
        "digest": digest(parts),
        "boxes": {name: list(boxes) for name, boxes in parts.items()},
        "life": int(np.asarray(state["life"].addressable_shards[0].data)),
    }


def run(order: Order) -> int:
    """Live one life; return the exit status."""
    journal = Journal(order.journal)
    os.environ.update(order.environ)
    clock = Clock(order.clock_s)
    for name in order.put_back:
        PUT_BACK[name]()
    os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = order.address
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", order.devices)
    journal.note("process.begun", pid=os.getpid())
    jax.distributed.initialize(
        order.address, order.count, order.process, heartbeat_timeout_seconds=100
    )
    stop = threading.Event()
    if order.resets:
        threading.Thread(target=reset_connections, args=(order, stop), daemon=True).start()
    try:
        return _train(order, journal, clock, stop)
    except SystemExit as end:
        journal.note("process.left", status=str(end.code))
        return 143
    except Exception as error:  # noqa: BLE001 - the driver judges
        traceback.print_exc()
        journal.note("process.raised", error=type(error).__name__, text=str(error)[:1500])
        return 1


def _train(order: Order, journal: Journal, clock: Clock, stop: threading.Event) -> int:
    mesh, data = mesh_of(order.slices), Data()
    checkpointer = EmergencyCheckpointer(
        config_with(order.settings),
        mesh=mesh,
        replica_axis="slice",
        host_state_remap=remap,
        on_event=Listener(journal, order.kill_at, order.settled),
    )
    with checkpointer as ckpt:
        step = state = None
        if order.goes_on_after is None:
            step, state = ckpt.restore(state=specs(mesh), host_state=data)
        stop.set()
        if state is None or step is None:
            journal.note("restored", step=None)
            step = order.goes_on_after or 0
        else:
            report = ckpt.last_restore
            assert report is not None
            journal.note("restored", step=step, data=data.at, tier=report.tier, **seen(state))
        del state
        first = step + 1
        last = step + (order.steps if order.ends else FOREVER)
        settled_at: int | None = None
        for step in range(first, last + 1):
            if settled_at is None and order.settled.exists():
                settled_at = step
            if settled_at is not None and order.raises_after == step - settled_at:
                raise RuntimeError("scripted: the training loop raises")
            if order.clock_jump is not None and order.clock_jump[0] == step - first:
                clock.offset_s += order.clock_jump[1]
            data.at = position(step, order.life, order.process)
            ckpt.save(step=step, state=state_at(step, order.life, mesh), host_state=data)
            journal.note("trained", step=step)
            if ckpt.reached_preemption(step):
                ckpt.wait_until_finished()
                raise SystemExit(143)
            time.sleep(0.002)
        ckpt.wait_until_finished()
        try:
            ckpt.check_for_errors()
        except Exception as error:  # noqa: BLE001 - the driver judges
            journal.note("save_errors", text=str(error)[:1500])
    journal.note("process.ended")
    return 0


def live(order: Order, log: Path) -> None:
    """Live one life in this fork of the soak's process, and never return."""
    status = 70
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = run(order)
        jax.distributed.shutdown()
    except Exception:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
