"""The example's trainer, which then writes the digests of its state and of its iterator.

With ``TEST_CRASH=LIVES:STEP`` each of the first lives crashes behind that step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "deploy/slurm"))

import jax
import train
from absl import logging

from emergency_ckpt import EmergencyCheckpointer
from examples.demo.train import iterator_digest, shard_digests

logging.set_verbosity(logging.INFO)  # the lines "saved step ... to RAM"
options = train.parse_arguments()
lives, last = map(int, os.environ["TEST_CRASH"].split(":"))
with Path(options.dir).with_name(f"lives-{os.environ['SLURM_PROCID']}").open("a+") as file:
    file.write("*")
    life = file.tell()
if life <= lives:
    reached_preemption = EmergencyCheckpointer.reached_preemption

    def crash(ckpt: EmergencyCheckpointer, step: int) -> bool:
        """Raise behind the last step, once what it saved is whole."""
        if step > last:
            ckpt.wait_until_finished()
            raise RuntimeError("the test's crash")
        return reached_preemption(ckpt, step)

    EmergencyCheckpointer.reached_preemption = crash
state, data = train.train(options)
digests = {"state": shard_digests(state), "iterator": iterator_digest(data.get_state())}
result = Path(options.dir).parent / f"digests-{jax.process_index()}.json"
result.write_text(json.dumps(digests))
