"""One recovery under Slurm: ``deploy/slurm/train.sbatch`` on the five real nodes of its tests.

Run it where those are: ``python tests/deploy/slurm/enter.py python -m benchmarks.recovery``.
"""

import contextlib
import importlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.recovery import phases
from emergency_ckpt.run_secret import SECRET_VARIABLE

sys.path.insert(0, str(ROOT / "tests" / "support"))
_of_tests = importlib.import_module("slurm_cluster")

WORKER = ROOT / "benchmarks" / "recovery" / "worker.py"
_TEMPLATE = ROOT / "deploy" / "slurm" / "train.sbatch"
_POLL_S = 0.005
_NODES = phases.SLICES * phases.HOSTS_PER_SLICE


class Slurm:
    """Runs jobs of two slices of two nodes, with a spare node, on a cluster of its own."""

    def __init__(self, timeout_s: float) -> None:
        """Start the cluster. ``timeout_s``: for each event of a job."""
        self._timeout_s = timeout_s
        self._root = Path(tempfile.mkdtemp(prefix="eckpt-recovery-"))
        self._cluster = _of_tests.SlurmCluster(self._root / "cluster")
        self._jobs = 0

    def run(self, worker: Sequence[str], environ: Mapping[str, str]) -> list[phases.Mark]:
        """Run one job, as ``launched.run`` does, with its storage in its own folder."""
        self._jobs += 1
        folder = self._root / f"job{self._jobs}"
        (folder / "marks").mkdir(parents=True)
        program = [sys.executable, str(WORKER), *worker]
        program += ["--marks-dir", str(folder / "marks"), "--hold"]
        self._write_batch_script(folder, program)
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            SECRET_VARIABLE: secrets.token_hex(32),
            **environ,
        }
        job = self._cluster.submit(folder, environ, f"--job-name={folder.name}")
        log = folder / f"train-{job}.log"
        try:
            events = self._lose_a_slice(folder, job, log)
            self._wait(log, lambda: self._state(job) not in ("RUNNING", "COMPLETING"), 0.2)
            if self._state(job) != "COMPLETED":
                raise RuntimeError(f"the job is {self._state(job)}:\n{log.read_text()[-4000:]}")
            return [*events, *phases.read_marks(folder / "marks")]
        finally:
            self._cluster.cancel(job)
            self._cluster.wait_until_idle()
            for name in _of_tests.NODES:
                self._cluster.wipe(name)

    def close(self) -> None:
        """End the cluster."""
        self._cluster.close()
        shutil.rmtree(self._root)

    def _write_batch_script(self, folder: Path, program: Sequence[str]) -> None:
        changes = {
            "1": f"#SBATCH --nodes={_NODES}-{_NODES + 1}",
            "3": f"nodes={_NODES}",
            "5": f"train=({shlex.join(program)})",
        }
        text = _TEMPLATE.read_text()
        for number, line in changes.items():
            text, count = re.subn(rf".*# change {number}:.*", lambda _, new=line: new, text)
            assert count == 1
        (folder / "train.sbatch").write_text(text)

    def _lose_a_slice(self, folder: Path, job: str, log: Path) -> list[phases.Mark]:
        """Kill slice 0 once all processes are at the fault's step; return the events."""
        marks = folder / "marks"

        def held() -> int:
            return sum(f'"{phases.HELD}"' in path.read_text() for path in marks.iterdir())

        self._wait(log, lambda: held() == _NODES)
        fault_s = time.time()
        for node in _of_tests.NODES[: phases.HOSTS_PER_SLICE]:
            for pid in self._cluster.pids_on(node, WORKER.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._cluster.wipe(node)
        ends = folder / f"ends-{job}.0"
        self._wait(log, lambda: any(path.stat().st_size for path in ends.iterdir()))
        noticed_s = time.time()
        self._wait(log, lambda: "life 0 ended" in log.read_text(errors="replace"))
        return [
            phases.Mark(fault_s, "fault.fired", life=0),
            phases.Mark(noticed_s, "process.exited", life=0),
            phases.Mark(time.time(), "life.ended", life=0),
        ]

    def _state(self, job: str) -> str:
        return self._cluster.job(job)["JobState"]

    def _wait(self, log: Path, is_so: Callable[[], bool], poll_s: float = _POLL_S) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_so():
            if time.monotonic() > deadline_s:
                text = log.read_text(errors="replace") if log.exists() else "no log"
                raise RuntimeError(
                    f"it did not come to that in {self._timeout_s:g} s:\n{text[-4000:]}"
                )
            time.sleep(poll_s)
