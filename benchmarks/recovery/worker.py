"""One process of a job that trains the demo's model, restored and saved by one contender."""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.common import contenders
from benchmarks.recovery import phases
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job, share_compiled_programs
from examples.demo import model

_SMALL = model.ModelConfig(sequence_length=32, d_model=64, num_layers=1)
"""For many processes on one machine: 0.7 MiB of state."""
_SEQUENCES_PER_DEVICE = 8
_LONGEST_HOLD_S = 60.0


def main() -> None:
    options = _parser().parse_args()
    contender = None
    if options.contender != phases.NOBODY:
        contender = contenders.load(options.contender)
    here = find_place(options)
    marks = phases.MarkFile(options.marks_dir, here.process, here.life)
    marks.add(phases.IMPORTED)
    here.join()
    jax.devices()
    marks.add(phases.JOINED)
    if contender is not None:
        contender.prepare()
    config, mesh = _SMALL if options.small else model.ModelConfig(), model.make_mesh(phases.SLICES)
    stored = _abstract_stored(config, mesh)
    marks.add(phases.DESCRIBED)
    session = None
    if contender is not None:
        session = contender.open_session(
            contenders.Site(
                mesh=mesh,
                replica_axis=0,
                abstract_state=stored,
                tier=contenders.BOTH if options.stored_every else contenders.RAM,
                local_dir=here.local_dir,
                persistent_dir=options.dir,
                bind_host="127.0.0.1",
                stored_every=options.stored_every,
            )
        )
    marks.add(phases.OPENED)
    train_step = model.compile_train_step(config, mesh, _SEQUENCES_PER_DEVICE * mesh.size)
    marks.add(phases.COMPILED)
    done, state = (None, None) if session is None else session.newest()
    if done is None:
        done, state = 0, model.init_state(config, mesh, 0)
    else:
        state = {**state, "key": jax.random.wrap_key_data(state["key"])}
    jax.block_until_ready(state)
    marks.add(phases.RESTORED, done, getattr(session, "spent_s", {}))
    saving_s = 0.0
    for step in range(done + 1, options.steps + 1):
        state, loss = train_step(state, _batch(config, mesh, step))
        jax.block_until_ready(loss)
        if step == done + 1:
            marks.add(phases.STEPPED)
        if session is not None and step % options.every == 0:
            marks.add(phases.SAVING)
            began_s = time.monotonic()
            session.save(step, _to_keep(state))
            saving_s += time.monotonic() - began_s
            if options.wait:
                session.wait()
            marks.add(phases.SAVED)
        if options.hold and (here.life, step) == (0, phases.FAULT_STEP):
            marks.add(phases.HELD)
            time.sleep(_LONGEST_HOLD_S)
            raise TimeoutError("no fault came")
        report_step(step)
    marks.add(phases.TRAINED, spent_s={phases.SAVING: saving_s})
    if session is not None:
        session.close()


def _abstract_stored(config: model.ModelConfig, mesh: Mesh) -> Any:
    """Return the state to keep, as ``jax.ShapeDtypeStruct``.

    The key is kept as numbers: Orbax's emergency manager restores no typed PRNG key.
    """
    abstract = model.abstract_state(config, mesh)
    key = jax.eval_shape(jax.random.key_data, abstract["key"])
    replicated = NamedSharding(mesh, PartitionSpec())
    numbers = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
    return {**abstract, "key": numbers}


def _to_keep(state: Any) -> Any:
    return {**state, "key": jax.random.key_data(state["key"])}


def _batch(config: model.ModelConfig, mesh: Mesh, step: int) -> Any:
    """Return the batch of ``step`` for the device of this process, the same each time."""
    shape = (_SEQUENCES_PER_DEVICE, config.sequence_length + 1)
    return model.global_batch(mesh, np.full(shape, step % 256, np.uint8))


class Place(NamedTuple):
    """This process in its job. ``life``: the number of its starts before."""

    process: int
    life: int
    local_dir: Path
    join: Callable[[], None]


def find_place(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place that `eckpt launch` or Slurm gave to this process."""
    if JobEnvironment.present(environ):
        env = JobEnvironment.from_environ(environ)
        return Place(
            env.process_index, env.restart_count, env.local_dir, lambda: initialize_job(env)
        )
    process = int(environ["SLURM_PROCID"])
    with (options.marks_dir.parent / f"starts-{process}").open("a+") as starts:
        life = starts.tell()
        starts.write("*")
    options.local_dir.mkdir(mode=0o700, exist_ok=True)
    return Place(process, life, options.local_dir, _join_by_slurm)


def _join_by_slurm() -> None:
    share_compiled_programs()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--marks-dir", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="the persistent directory")
    parser.add_argument("--steps", type=int, default=phases.LAST_STEP)
    parser.add_argument("--every", type=int, default=phases.SAVE_EVERY, help="steps between saves")
    parser.add_argument("--stored-every", type=int, default=0, help="0: saves go to RAM only")
    parser.add_argument("--wait", action="store_true", help="wait for the end of each save")
    parser.add_argument("--small", action="store_true", help="a smaller model")
    parser.add_argument("--hold", action="store_true", help="wait for the fault at its step")
    # The batch script adds these, where no launcher says it.
    parser.add_argument("--local-dir", type=Path)
    for name in ("--run-id", "--secret-file"):
        parser.add_argument(name, help="not used: each job has a directory and a secret of its own")
    return parser


if __name__ == "__main__":
    main()
