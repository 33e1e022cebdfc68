"""The demo's trainer: one process of the job. ``python -m examples.demo.train``.

The launcher starts it once per host, with its place in the job in the environment. It trains, calls
``save`` after every step, and writes a file of digests of its final state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from absl import logging

from emergency_ckpt.checkpointer import EmergencyCheckpointer
from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.extras.event_log import EventLog, open_event_log
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job
from examples.demo import data, model, results

SEQUENCES_PER_DEVICE = 8
_LOG_BYTES = 64 << 20


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the trainer's own options; its place in the job comes from the environment."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.train")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--local-every", type=int, required=True, help="steps between RAM saves")
    parser.add_argument("--persistent-every", type=int, required=True)
    parser.add_argument("--persistent-dir", required=True)
    parser.add_argument("--result-dir", type=Path, required=True, help="where the digests go")
    return parser.parse_args(argv)


class Trainer:
    """The training loop of one process. All processes of the job must run it."""

    def __init__(self, env: JobEnvironment, options: argparse.Namespace, log: EventLog) -> None:
        """Create the mesh and read the text; ``jax.distributed`` must be initialized."""
        self._options = options
        self._log = log
        self._slice_index = env.slice_index
        self._config = model.ModelConfig()
        self._mesh = model.make_mesh(env.slice_count)
        corpus = data.read_corpus()
        self._corpus_digest = data.corpus_digest(corpus)
        self._iterator = data.make_iterator(
            corpus,
            sequence_length=self._config.sequence_length,
            batch_size=SEQUENCES_PER_DEVICE * env.devices_per_host,
            seed=options.seed,
            process_index=env.process_index,
            process_count=env.process_count,
        )
        self._checkpointer_config = EmergencyCheckpointer.default_config().set(
            dir=options.persistent_dir,
            local_dir=str(env.local_dir),
            local_save_every=options.local_every,
            save_every=options.persistent_every,
            mesh=self._mesh,
            replica_axis=0,
        )

    def _note(self, name: str, fields: Mapping[str, Any]) -> None:
        self._log.note(name, fields, slice=self._slice_index)

    def run(self) -> results.ProcessResult:
        """Compile, restore, train, wait for the saves. Collective; blocks.

        Blocking, collective.
        """
        abstract = model.abstract_state(self._config, self._mesh)
        with self._checkpointer_config.instantiate() as checkpointer:
            # Compiled now and not at the first call, because CPU collectives wait at most 30 s and
            # processes that share cores compile at different speeds. The restore synchronizes them.
            sequences = SEQUENCES_PER_DEVICE * self._mesh.size
            train_step = model.compile_train_step(self._config, self._mesh, sequences)
            self._note("train.compiled", {})
            done, state = checkpointer.restore(state=abstract, host_state=self._iterator)
            if done is None:
                done = 0
                state = model.init_state(self._config, self._mesh, self._options.seed)
            self._note("train.started", {"step": done, "steps": self._options.steps})
            loss: float | None = None
            for step in range(done + 1, self._options.steps + 1):
                batch = model.global_batch(self._mesh, next(self._iterator))
                state, step_loss = train_step(state, batch)
                if step % self._options.persistent_every == 0:
                    # The scenarios count on every such step in storage: none may be skipped.
                    checkpointer.wait_until_finished()
                checkpointer.save(step=step, state=state, host_state=self._iterator)
                loss = float(step_loss)
                self._note("train.loss", {"step": step, "loss": loss})
                report_step(step)
                if checkpointer.reached_preemption(step):
                    checkpointer.wait_until_finished()
                    raise SystemExit(PREEMPTED_EXIT_CODE)
            checkpointer.wait_until_finished()
            checkpointer.check_for_errors()
        return results.ProcessResult(
            process_index=jax.process_index(),
            steps=self._options.steps,
            loss=loss,
            corpus=self._corpus_digest,
            shards=shard_digests(state),
            iterator=iterator_digest(self._iterator.get_state()),
        )


def write_result(directory: Path, result: results.ProcessResult) -> None:
    """Write ``result`` to its file in ``directory``, which is read after the end of the job."""
    path = directory / f"process_{result.process_index:05d}.json"
    path.write_bytes(msgspec.json.encode(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of the demo job to its end; return the exit code for the launcher."""
    options = parse_arguments(argv)
    env = JobEnvironment.from_environ()
    assert env.event_log is not None, "the launcher has one"
    # Shared with the checkpointer, whose events go there by default.
    log = open_event_log(
        env.event_log, env.process_index, limit_bytes=_LOG_BYTES, life=env.restart_count
    )
    try:
        return _train(env, options, log)
    finally:
        log.close()


def _train(env: JobEnvironment, options: argparse.Namespace, log: EventLog) -> int:
    place = {"slice": env.slice_index}
    log.note("train.launched", {"pid": os.getpid()}, **place)
    initialize_job(env)
    result = Trainer(env, options, log).run()
    write_result(options.result_dir, result)
    log.note("train.finished", {"step": result.steps, "loss": result.loss}, **place)
    logging.info("finished at step %d with loss %s", result.steps, result.loss)
    return 0


def shard_digests(state: Any) -> dict[str, str]:
    """Return the SHA-256 of each shard of ``state`` on this process's devices, by shard name."""
    digests: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array = leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(leaf)
        for shard in array.addressable_shards:
            box = ",".join(
                f"{part.start or 0}:{size if part.stop is None else part.stop}"
                for part, size in zip(shard.index, array.shape, strict=True)
            )
            host = np.ascontiguousarray(np.asarray(shard.data))
            header = f"{host.dtype}{host.shape}".encode()
            digests[f"{name}[{box}]"] = hashlib.sha256(header + host.tobytes()).hexdigest()
    return digests


def iterator_digest(iterator_state: object) -> str:
    """Return the SHA-256 of a data iterator's state: of its JSON form, or of its bytes."""
    if isinstance(iterator_state, bytes):
        return hashlib.sha256(iterator_state).hexdigest()
    text = json.dumps(iterator_state, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
