"""Jobs that save as often as they can, or when they are told to leave; judged by their tests.

Training is one array to which each step adds one, and a sum over all devices that keeps the
processes together as a real step does.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from configs import config_with
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import Iterator, JobProcess, finish, mesh_of, run_program
from memory_coordination import meet
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.cluster.coordination import JaxCoordinator, connect
from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.extras.pace import AdaptiveInterval
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

CLOCK_SKEW_S = 137.0
SLOW_PROCESS = 2
LONGEST_S = 60.0
_SHORT_S = 0.05


class Training:
    """A state whose every element is the step."""

    def __init__(self, slices: int) -> None:
        self.mesh = mesh_of(slices)
        sharded, whole = (NamedSharding(self.mesh, spec) for spec in (P("fsdp"), P()))
        every = NamedSharding(self.mesh, P(("slice", "fsdp")))
        ones = np.ones(self.mesh.size, np.float32)
        self.ones = jax.make_array_from_callback(ones.shape, every, lambda index: ones[index])

        def step(state: Any, ones: Any) -> Any:
            # The sum needs all processes; it adds one to each element.
            return {"w": state["w"] + jnp.sum(ones) / ones.size}

        self.compiled = jax.jit(step, out_shardings={"w": sharded}, donate_argnums=0)
        zeros = np.zeros((64, 16), np.float32)
        self.zero = {
            "w": jax.make_array_from_callback(zeros.shape, sharded, lambda index: zeros[index])
        }
        self.spec = {"w": jax.ShapeDtypeStruct(zeros.shape, np.float32, sharding=sharded)}
        del whole

    def step(self, state: Any) -> Any:
        state = self.compiled(state, self.ones)
        jax.block_until_ready(state)
        return state

    @staticmethod
    def is_at(state: Any, step: int) -> bool:
        return all((np.asarray(s.data) == step).all() for s in state["w"].addressable_shards)


def skew_clocks(process: int) -> None:
    """From now on this process's clocks run minutes beside those of the others."""
    for name in ("time", "monotonic"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: real() + process * CLOCK_SKEW_S)


class CallsOfTheTrainingThread:
    """Names of the functions of the coordination service that this thread calls meanwhile."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __enter__(self) -> CallsOfTheTrainingThread:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("cluster/coordination.py"):
            self.seen.add(frame.f_code.co_name)
        if event == "c_call":
            name = getattr(argument, "__name__", "")
            if name.startswith(("key_value", "blocking_key", "wait_at_barrier")):
                self.seen.add(name)


def _steps(world: JobProcess, event: str) -> list[int]:
    return [fields["step"] for fields in world.named(event)]


def _run(
    world: JobProcess, name: str, saves: int, *, stride: int = 1, **settings: Any
) -> dict[str, Any]:
    """Train until the leader has seen ``saves`` complete local saves; what this process saw.

    ``stride``: by how much steps rise from call to call of ``save``.
    """
    training = Training(world.slices)
    iterator = Iterator(world.process)
    calls = CallsOfTheTrainingThread()
    longest_save_s = 0.0
    stop_at: int | None = None
    with world.config(name, mesh=training.mesh, **settings).instantiate() as ckpt:
        ckpt.restore(state=training.spec, host_state=iterator)
        state, calls_made = training.zero, 0
        begun_s = time.monotonic()
        while stop_at is None or calls_made < stop_at:
            state = training.step(state)
            calls_made += 1
            step = calls_made * stride
            if world.process == SLOW_PROCESS:
                time.sleep(0.001)
            if 50 <= calls_made < 150:
                with calls:
                    ckpt.save(step=step, state=state, host_state=iterator.at(step))
            else:
                before_s = time.monotonic()
                ckpt.save(step=step, state=state, host_state=iterator.at(step))
                longest_save_s = max(longest_save_s, time.monotonic() - before_s)
            if stop_at is None and calls_made % 100 == 0:
                enough = len(_steps(world, "save.complete")) >= saves
                over = enough or time.monotonic() - begun_s > LONGEST_S
                # As real loops do, the last step is agreed by all.
                if world.process == 0 and over:
                    world.meeting.put(f"stop/{name}/{calls_made}", b"")
                meet(world.meeting, f"look/{name}/{calls_made}", 60)
                if str(calls_made) in world.meeting.list(f"stop/{name}"):
                    stop_at = calls_made + 20
        finish(ckpt)
        world.meet()
    seen = {
        "calls_made": calls_made,
        "seconds": time.monotonic() - begun_s,
        "started": _steps(world, "save.started"),
        "published": _steps(world, "save.stage.published"),
        "complete": _steps(world, "save.complete"),
        "incomplete": _steps(world, "save.incomplete"),
        "late": _steps(world, "save.skipped.late"),
        "stored": _steps(world, "persistent.complete"),
        "calls": sorted(calls.seen),
        "longest_save_s": longest_save_s,
    }
    world.events.clear()
    with world.config(name, mesh=training.mesh, **settings).instantiate() as ckpt:
        restored, state = ckpt.restore(state=training.spec, host_state=iterator)
        world.meet()
    right = Training.is_at(state, (restored or 0) // stride)
    return {
        **seen,
        "restored": restored,
        "right": right and iterator.is_at(restored or 0, world.process),
    }


def continuous(world: JobProcess) -> Any:
    policy = ocm.ContinuousCheckpointingPolicy()
    return _run(world, "continuous", 80, local_save_every=policy)


def stride_10(world: JobProcess) -> Any:
    policy = ocm.ContinuousCheckpointingPolicy()
    return _run(world, "stride_10", 60, stride=10, local_save_every=policy)


def stride_100(world: JobProcess) -> Any:
    policy = ocm.ContinuousCheckpointingPolicy()
    return _run(world, "stride_100", 60, stride=100, local_save_every=policy)


def seconds_at_stride_100(world: JobProcess) -> Any:
    every = datetime.timedelta(seconds=0.25)
    return _run(world, "seconds_100", 6, stride=100, local_save_every=every)


def users_own_at_stride_10(world: JobProcess) -> Any:
    return _run(world, "own_10", 12, stride=10, local_save_every=EveryThirteenth())


def both_tiers(world: JobProcess) -> Any:
    policy = ocm.AnySavePolicy(
        [ocm.ContinuousCheckpointingPolicy(), ocm.SpecificStepsPolicy([7, 70])]
    )
    result = _run(
        world,
        "both",
        40,
        local_save_every=policy,
        save_every=ocm.ContinuousCheckpointingPolicy(),
        dir=str(world.root / "persistent"),
        preservation_policy=ocm.LatestN(2),
    )
    kept = {int(p.name) for p in (world.root / "persistent").iterdir() if p.name.isdecimal()}
    return {**result, "kept": sorted(kept)}


def late(world: JobProcess) -> Any:
    """One process reads two of the announcements a second after the others."""
    read, slow = JaxCoordinator.get, iter([False] * 7 + [True] + [False] * 9 + [True])

    def get(coordinator: JaxCoordinator, key: str, timeout_s: float) -> bytes:
        if "/step/" in key and world.process == SLOW_PROCESS and next(slow, False):
            time.sleep(1.0)
        return read(coordinator, key, timeout_s)

    JaxCoordinator.get = get
    try:
        policy = ocm.ContinuousCheckpointingPolicy()
        directory = str(world.root / "late_stored")
        return _run(world, "late", 30, local_save_every=policy, save_every=policy, dir=directory)
    finally:
        JaxCoordinator.get = read


def adaptive(world: JobProcess) -> Any:
    policy = AdaptiveInterval(mean_time_between_failures_s=5.0, max_overhead=0.2)
    return _run(world, "adaptive", 20, local_save_every=policy)


class EveryThirteenth:
    """A user's own policy: the leader is asked, in the background."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del previous_steps, context
        self.threads.add(threading.current_thread().name)
        return step.step % 13 == 0


def users_own(world: JobProcess) -> Any:
    policy = EveryThirteenth()
    result = _run(world, "own", 20, local_save_every=policy)
    return {**result, "asked_in": sorted(policy.threads)}


def every_second(world: JobProcess) -> Any:
    return _run(world, "seconds", 8, local_save_every=datetime.timedelta(seconds=0.25))


# Lives that are killed, or told to leave; run by a supervisor.


class Hooks:
    """Strikes this process at an event, in the thread that emits it; see ``test_preemption``."""

    def __init__(self, hooks: list[dict[str, Any]], env: JobEnvironment) -> None:
        mine = {"process": env.process_index, "life": env.restart_count}
        self.hooks = [h for h in hooks if all(h.get(key, at) == at for key, at in mine.items())]
        self.request: Callable[[], None] | None = None

    def strike(self, point: str, step: int | None) -> None:
        for hook in list(self.hooks):
            if hook["event"] == point and hook.get("step", step) == step:
                self.hooks.remove(hook)
                if "signal" in hook:
                    os.kill(os.getpid(), signal.Signals[f"SIG{hook['signal']}"])
                if "touch" in hook:
                    Path(hook["touch"]).touch()
                if "request" in hook and self.request is not None:
                    self.request()
                for _ in range(round(hook.get("sleep_s", 0.0) / _SHORT_S)):
                    time.sleep(_SHORT_S)  # of a pause of the machine only one of these is lost


def train_until(
    world: JobProcess, env: JobEnvironment, last: int, settings: dict[str, Any]
) -> None:
    """Train to ``last``; write down what was seen, as it is seen."""
    training = Training(world.slices)
    iterator = Iterator(world.process)
    path = world.root / f"seen_{env.restart_count}_{world.process}.jsonl"
    hooks = Hooks(settings.pop("hooks", []), env)
    pace_s = settings.pop("pace_s", 0.0)

    def note(**fields: Any) -> None:
        with path.open("a") as log:
            log.write(json.dumps(fields) + "\n")

    def listen(event: Any) -> None:
        if event.name.startswith(("save.", "persistent.", "preemption.")):
            note(event=event.point, **event.fields)
        hooks.strike(event.point, event.fields.get("step"))

    defaults: dict[str, Any] = {
        "run_id": "life",
        "local_dir": str(env.local_dir),
        "mesh": training.mesh,
        "on_event": [listen, *settings.pop("observers", ())],
        "total_timeout_s": 60,
        "save_timeout_s": 30,
    }
    config = config_with({**defaults, **settings})
    training.step(training.zero)  # compiled before anyone waits for anyone
    state, step = Training(world.slices).zero, 0
    with config.instantiate() as ckpt:
        hooks.request = ckpt.request_preemption
        restored, found = ckpt.restore(state=training.spec, host_state=iterator)
        if restored is not None:
            state, step = found, restored
        note(restored=restored, right=Training.is_at(state, step))
        while step < last:
            state = training.step(state)
            step += 1
            ckpt.save(step=step, state=state, host_state=iterator.at(step))
            report_step(step)
            time.sleep(pace_s)
            if ckpt.reached_preemption(step):
                note(left_at=step)
                ckpt.wait_until_finished()
                raise SystemExit(PREEMPTED_EXIT_CODE)
        ckpt.wait_until_finished()
        note(finished=step)


def life(arguments: list[str]) -> None:
    """``life ROOT SLICES LAST SETTINGS``: one process of a job that a supervisor keeps alive."""
    root, slices, last = Path(arguments[0]), int(arguments[1]), int(arguments[3])
    env = JobEnvironment.from_environ()
    initialize_job(env)
    world = JobProcess(root, env.process_index, env.process_count, slices, connect("meeting"))
    settings: dict[str, Any] = json.loads(arguments[4]) if len(arguments) > 4 else {}
    if settings.pop("continuous", False):
        settings["local_save_every"] = ocm.ContinuousCheckpointingPolicy()
    train_until(world, env, last, settings)


STRIDES = (stride_10, stride_100, seconds_at_stride_100, users_own_at_stride_10)
PROGRAMS = {
    p.__name__: p
    for p in (continuous, both_tiers, late, adaptive, users_own, every_second, *STRIDES)
}

if __name__ == "__main__":
    if sys.argv[3:4] == ["life"]:
        life(sys.argv[1:])
    else:
        skew_clocks(JobEnvironment.from_environ().process_index)
        run_program(PROGRAMS)
