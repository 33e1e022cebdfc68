"""Lives that end because one process is killed with SIGKILL at a named point."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from running_jobs import LIFE_TIMEOUT_S, spec_of

from emergency_ckpt.tools.launch.job import ProcessExit
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

KILL_VARIABLE = "ECKPT_TEST_KILL"
RESTORE_RETURNED = "restore.returned"
"""No event: the training loop has the state back."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """Who dies where.

    Attributes:
      name: directory of the case, below the root; holds a ramdisk for each host.
      program: of ``kill_job.py``.
      point: the event at which the victim kills itself, before it goes on. Of persistent saves
        also ``request:<glob>`` or ``request#<k>``: while the first such, or the k-th, request that
        changes the bucket has not been applied yet; and ``file#<k>``: before the k-th change that
        Python makes to the directory. If there are fewer, it dies when its part is done.
      survivor: how far the other process is then. ``ahead``: it has done all that it can do
        alone; the victim waits for that. ``behind``: it has not begun. ``free``: anywhere.
      finishes: the test waits until the survivor has told that it is through with its part.
      slices, hosts: shape of the job.
      bucket: the persistent directory is in a bucket of the fake server.
    """

    name: str
    program: str
    point: str
    victim: int
    survivor: Literal["ahead", "behind", "free"] = "free"
    finishes: bool = False
    slices: int = 2
    hosts: int = 1
    bucket: bool = False

    def to_environ(self) -> dict[str, str]:
        return {KILL_VARIABLE: json.dumps(dataclasses.asdict(self))}

    @staticmethod
    def from_environ() -> Kill | None:
        text = os.environ.get(KILL_VARIABLE)
        return None if text is None else Kill(**json.loads(text))


def crash(root: Path, kill: Kill, *, life: int = 0) -> ProcessExit:
    """Run a life until the victim has killed itself, then end the others as a supervisor does.

    Returns how the victim ended.
    """
    spec = spec_of(root, "kill_job.py", slices=kill.slices, hosts=kill.hosts)
    spec = dataclasses.replace(
        spec,
        env=kill.to_environ(),
        local_root=root / "hosts" / kill.name,
        log_dir=root / "logs" / kill.name,
    )
    with ProcessSet(spec, restart_count=life) as processes:
        deadline_s = time.monotonic() + LIFE_TIMEOUT_S
        while kill.victim in processes.running:
            assert time.monotonic() < deadline_s, f"{kill}: the point was not reached"
            processes.poll()
            time.sleep(POLL_S)
        (end,) = (end for end in processes.exits if end.process == kill.victim)
        log = spec.log_path(life, kill.victim).read_text()[-3000:]
        assert end.returncode == -signal.SIGKILL, f"{kill}: {end}\n{log}"
        if kill.finishes:
            while max(processes.steps) < 1:
                assert processes.running, f"{kill}: the survivor ended before it was through"
                assert time.monotonic() < deadline_s, f"{kill}: the survivor is not through"
                processes.poll()
                time.sleep(POLL_S)
        processes.end(grace_s=0)
    return end


def copy_without(root: Path, name: str, copy: str, lost: Iterable[int]) -> str:
    """The ramdisks of ``name`` as ``copy``, where the hosts ``lost`` came back empty."""
    shutil.copytree(root / name, root / copy)
    for host in lost:
        shutil.rmtree(root / copy / f"host_{host}")
    return copy
