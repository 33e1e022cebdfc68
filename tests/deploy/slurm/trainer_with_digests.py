"""The example's trainer, which then writes the digests of its state and of its iterator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "deploy/slurm"))

import jax
import train
from absl import logging

from emergency_ckpt.demo.digest import iterator_digest, shard_digests

logging.set_verbosity(logging.INFO)  # the lines "saved step ... to RAM"
options = train.parse_arguments()
state, data = train.train(options)
digests = {"state": shard_digests(state), "iterator": iterator_digest(data.get_state())}
result = Path(options.dir).parent / f"digests-{jax.process_index()}.json"
result.write_text(json.dumps(digests))
