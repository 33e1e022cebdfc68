"""The key under which JAX's preemption service keeps a notice, which has no public name."""

from __future__ import annotations

import subprocess
import sys

from launch_support import free_port

_PROGRAM = """
import os, signal, sys, time
import jax

jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=1, process_id=0)
from emergency_ckpt.cluster.coordination import jax_has_notice, jax_hears_notices

print(jax_hears_notices(), jax_has_notice())
os.kill(os.getpid(), signal.SIGTERM)  # JAX's own handler
end_s = time.monotonic() + 60
while not jax_has_notice() and time.monotonic() < end_s:
    time.sleep(0.05)
print(jax_has_notice())
"""


def test_notice_that_jax_takes_is_found() -> None:
    command = [sys.executable, "-c", _PROGRAM, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr[-2000:]
