"""The keys of JAX's preemption service, which have no public names."""

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
print(jax_has_notice(), flush=True)
os._exit(0)  # JAX's own end waits three minutes and more where it comes before JAX's agreement
"""


def test_notice_that_jax_takes_is_found() -> None:
    command = [sys.executable, "-c", _PROGRAM, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr[-2000:]


_AGREEMENT = """
import sys, time
import jax
from jax.experimental import multihost_utils

process = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=process)
from emergency_ckpt.cluster.coordination import connect
from emergency_ckpt.cluster.preemption import AgreedNotices

notices = AgreedNotices(connect("notices"), 60.0)
if process == 1:
    notices.notice()
step = 1
while not notices.reached(step):
    step += 1
    time.sleep(0.01)
notices.close()
# JAX's steps are those at which it is asked, of which these are the first.
jax_step = 1
while not multihost_utils.reached_preemption_sync_point(jax_step) and jax_step < 1000:
    jax_step += 1
print(step, jax_step)
"""


def test_notice_of_ours_is_one_of_jax_before_a_process_can_end() -> None:
    """A process that ends before JAX's agreement holds up the others for three minutes."""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _AGREEMENT, port, str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    told = [(*process.communicate(), process.returncode) for process in started]
    assert [code for _, _, code in told] == [0, 0], told
    (seen,) = {text for text, _, _ in told}
    assert seen.split()[1] == "1"
