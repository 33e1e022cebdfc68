"""One process of the job whose recovery is measured: the demo's model, saved every few steps."""

import argparse
import time
from pathlib import Path

import jax

from benchmarks.common import contenders
from benchmarks.recovery import phases, place, training
from emergency_ckpt.extras.progress import report_step
from examples.demo import model

SAVE_EVERY = 5
SMALL = model.ModelConfig(sequence_length=32, d_model=64, num_layers=1)
"""For many processes on one machine: 0.7 MiB of state."""
_LONGEST_HOLD_S = 60.0


def main() -> None:
    options = _parser().parse_args()
    contender = contenders.load(options.contender)
    here = place.find(options)
    marks = phases.MarkFile(options.marks_dir, here.process, here.life)
    marks.add(phases.IMPORTED)
    here.join()
    jax.devices()
    marks.add(phases.JOINED)
    contender.prepare()
    config, mesh = SMALL if options.small else model.ModelConfig(), model.make_mesh(here.slices)
    stored = training.described(config, mesh)
    marks.add(phases.DESCRIBED)
    session = contender.open_session(
        contenders.Site(
            mesh=mesh,
            replica_axis=0,
            abstract_state=stored,
            tier=contenders.RAM,
            local_dir=here.local_dir,
            persistent_dir=options.dir,
            bind_host="127.0.0.1",
        )
    )
    marks.add(phases.OPENED)
    sequences = training.SEQUENCES_PER_DEVICE * mesh.size
    train_step = model.compile_train_step(config, mesh, sequences)
    marks.add(phases.COMPILED)
    if here.life == 0:
        session.start_fresh()
        done, state = 0, model.init_state(config, mesh, 0)
    else:
        done, state = phases.RESTORE_STEP, contenders.restore(session, phases.RESTORE_STEP)
        jax.block_until_ready(state)
        state = training.to_train(state)
    spent_s = session.spent_s if isinstance(session, contenders.TellsParts) else {}
    marks.add(phases.RESTORED, spent_s)
    for step in range(done + 1, phases.LAST_STEP + 1):
        batch = training.batch(config, mesh, here.devices_per_host, step)
        state, loss = train_step(state, batch)
        jax.block_until_ready(loss)
        if step == done + 1:
            marks.add(phases.STEPPED)
        if step % SAVE_EVERY == 0:
            marks.add(phases.SAVING)
            session.save(step, training.to_keep(state))
            session.wait()
            marks.add(phases.SAVED)
        if options.hold and (here.life, step) == (0, phases.FAULT_STEP):
            marks.add(phases.HELD)
            time.sleep(_LONGEST_HOLD_S)
            raise TimeoutError("no fault came")
        report_step(step)
    session.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--marks-dir", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="the persistent directory")
    parser.add_argument("--small", action="store_true", help="a smaller model")
    parser.add_argument("--hold", action="store_true", help="wait for the fault at its step")
    # Where no launcher says it; the batch script adds the last three.
    parser.add_argument("--slices", type=int)
    parser.add_argument("--local-dir", type=Path)
    for name in ("--run-id", "--secret-file"):
        parser.add_argument(name, help="not used: each job has a directory and a secret of its own")
    return parser


if __name__ == "__main__":
    main()
