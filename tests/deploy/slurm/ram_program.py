"""Reserve RAM as a start does, without JAX: ``ram_program.py SLOT_MIB``; the first life dies."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from emergency_ckpt.ram.host_memory import memory_limits, tightest
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.types import Writer

parser = argparse.ArgumentParser()
parser.add_argument("slot_mib", type=int)
parser.add_argument("--local-dir", type=Path, required=True)
parser.add_argument("--run-id", required=True)
options, _ = parser.parse_known_args()
process, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
writer = Writer(process, count, 0, os.uname().nodename)
tier = LocalTier(options.local_dir, options.run_id, writer, copy_threads=1)
found = len(list(tier.path.glob("slot_*.bin")))
tier.reserve(options.slot_mib << 20)
limit = tightest(memory_limits())
assert limit is not None
charged_mib = limit.charged_bytes >> 20
print(f"process {process}: found {found} slots, {charged_mib} MiB count in the job", flush=True)
if not found:
    Path(f"reserved-{process}").touch()
    deadline_s = time.monotonic() + 60
    while len(list(Path().glob("reserved-*"))) < count and time.monotonic() < deadline_s:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
tier.close()
