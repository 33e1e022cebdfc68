"""One process of the job whose recovery is measured: the demo's model, saved every few steps."""

import argparse
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common import contenders
from benchmarks.recovery import phases
from emergency_ckpt.demo import model
from emergency_ckpt.launch.environment import JobEnvironment, report_step
from emergency_ckpt.testing.simulated_job import initialize_job

SAVE_EVERY = 5
_SEQUENCES_PER_DEVICE = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--persistent-dir", type=Path, required=True)
    parser.add_argument("--marks-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--restore-step", type=int, required=True)
    options = parser.parse_args()
    contender = contenders.load(options.contender)
    env = JobEnvironment.from_environ()
    marks = phases.MarkFile(options.marks_dir, env.process_index, env.restart_count)
    marks.add(phases.IMPORTED)
    initialize_job(env)
    jax.devices()
    marks.add(phases.JOINED)
    contender.prepare()
    config, mesh = model.ModelConfig(), model.make_mesh(env.slice_count)
    abstract = model.abstract_state(config, mesh)
    # As numbers: Orbax's emergency manager restores no typed PRNG key.
    key = jax.eval_shape(jax.random.key_data, abstract["key"])
    replicated = NamedSharding(mesh, PartitionSpec())
    stored = {
        **abstract, "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
    }  # fmt: skip
    session = contender.open_session(
        contenders.Site(
            mesh=mesh,
            replica_axis=0,
            abstract_state=stored,
            tier=contenders.RAM,
            local_dir=env.local_dir,
            persistent_dir=options.persistent_dir,
            bind_host="127.0.0.1",
        )
    )
    if isinstance(session, contenders.Prefetching):
        session.prefetch()
    marks.add(phases.OPENED)
    sequences = _SEQUENCES_PER_DEVICE * mesh.size
    train_step = model.compile_train_step(config, mesh, sequences)
    marks.add(phases.COMPILED)
    if env.restart_count == 0:
        session.start_fresh()
        done, state = 0, model.init_state(config, mesh, 0)
    else:
        done, state = options.restore_step, session.restore(options.restore_step)
        jax.block_until_ready(state)
        state = {**state, "key": jax.random.wrap_key_data(state["key"])}
    hidden_s = session.hidden_s if isinstance(session, contenders.Prefetching) else 0.0
    marks.add(phases.RESTORED, hidden_s)
    rows = _SEQUENCES_PER_DEVICE * env.devices_per_host
    for step in range(done + 1, options.steps + 1):
        local = np.full((rows, config.sequence_length + 1), step % 256, np.uint8)
        state, loss = train_step(state, model.global_batch(mesh, local))
        jax.block_until_ready(loss)
        if step == done + 1:
            marks.add(phases.STEPPED)
        if step % SAVE_EVERY == 0:
            session.save(step, {**state, "key": jax.random.key_data(state["key"])})
            session.wait()
        report_step(step)
    session.close()


if __name__ == "__main__":
    main()
