"""What the tests of restarts share: a run in mid-training, and copies of its hosts' RAM."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from running_jobs import LIFE_TIMEOUT_S

from emergency_ckpt.tools.launch.job import JobSpec
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

RUN_ID = "lives"
HELD_STEP = 12


def train_and_kill(
    spec: JobSpec,
    victims: Sequence[int],
    held_step: int = HELD_STEP,
    saved: Callable[[], bool] = lambda: True,
) -> None:
    """Train until all are at ``held_step`` and ``saved`` holds, kill ``victims``, end the rest."""
    with ProcessSet(spec) as processes:
        everyone = range(len(processes.pids))
        processes.hold_at(everyone, held_step)
        deadline_s = time.monotonic() + LIFE_TIMEOUT_S
        while min(processes.steps) < held_step or not saved():
            assert not processes.poll(), f"{processes.exits}; logs in {spec.log_dir}"
            assert time.monotonic() < deadline_s, f"steps {processes.steps}"
            time.sleep(POLL_S)
        processes.signal(victims, signal.SIGKILL)
        processes.end(grace_s=0)


def new_world(spec: JobSpec, name: str, hosts: Iterable[int], lost: Iterable[int] = ()) -> None:
    """Copy what ``hosts`` hold of the world ``base`` to ``name``, but for those ``lost``."""
    for host in set(hosts) - set(lost):
        shutil.copytree(spec.ramdisk(host) / "base", spec.ramdisk(host) / name)
