"""One process of the job that is timed: the demo's model, restored and saved by one contender."""

import argparse
import time
from pathlib import Path

import jax

from benchmarks.common import contenders
from benchmarks.recovery import phases, place, training
from emergency_ckpt.extras.progress import report_step
from examples.demo import model

TRAINED = "trained"
"""Mark of a process after its last step."""
SAVING = "saving"
"""Name of the seconds that the process spent in calls of ``save``, with that mark."""
NOBODY = "nobody"
"""Name of the contender that saves nothing."""
STORED_EVERY = 50
"""A contender with two tiers brings a save to storage as well about every so many steps."""
STEPS = "steps"
"""File with one byte for each step that process 0 has trained, also those that are lost later."""


def main() -> None:
    options = _parser().parse_args()
    here = place.find(options)
    marks = phases.MarkFile(options.marks_dir, here.process, here.life)
    marks.add(phases.IMPORTED)
    here.join()
    jax.devices()
    marks.add(phases.JOINED)
    config, mesh = model.ModelConfig(), model.make_mesh(here.slices)
    stored = training.described(config, mesh)
    session = None
    contender = None if options.contender == NOBODY else contenders.load(options.contender)
    if contender is not None:
        contender.prepare()
    marks.add(phases.DESCRIBED)
    if contender is not None:
        session = contender.open_session(
            contenders.Site(
                mesh=mesh,
                replica_axis=0,
                abstract_state=stored,
                tier=contenders.BOTH,
                local_dir=here.local_dir,
                persistent_dir=options.dir,
                bind_host="127.0.0.1",
                stored_every=options.every * max(1, round(STORED_EVERY / options.every)),
            )
        )
    marks.add(phases.OPENED)
    sequences = training.SEQUENCES_PER_DEVICE * mesh.size
    train_step = model.compile_train_step(config, mesh, sequences)
    marks.add(phases.COMPILED)
    done, state = (None, None) if session is None else session.newest()
    if done is None:
        done, state = 0, model.init_state(config, mesh, 0)
    else:
        state = training.to_train(state)
    jax.block_until_ready(state)
    marks.add(phases.RESTORED)
    saving_s = 0.0
    with (options.marks_dir.parent / STEPS).open("ab", buffering=0) as trained:
        for step in range(done + 1, options.steps + 1):
            batch = training.batch(config, mesh, here.devices_per_host, step)
            state, loss = train_step(state, batch)
            jax.block_until_ready(loss)
            if step == done + 1:
                marks.add(phases.STEPPED)
            if session is not None and step % options.every == 0:
                begun_s = time.monotonic()
                session.save(step, training.to_keep(state))
                saving_s += time.monotonic() - begun_s
            if here.process == 0:
                trained.write(b".")
            report_step(step)
    marks.add(TRAINED, {SAVING: saving_s})
    if session is not None:
        session.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between saves")
    parser.add_argument("--marks-dir", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="the persistent directory")
    return parser


if __name__ == "__main__":
    main()
