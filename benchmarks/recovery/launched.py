"""One recovery under `eckpt launch`: processes of this machine."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.recovery import phases
from emergency_ckpt.tools.launch.job import JobSpec
from examples.faults.faults import parse_fault
from examples.faults.injection import FaultySupervisor


class Launcher:
    """Runs jobs under `eckpt launch`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def measure(
        self, worker: Sequence[str], environ: Mapping[str, str], hosts: int | None = None
    ) -> phases.Recovery:
        """Run one job and return its recovery. RuntimeError, with the log, when it did not end.

        ``hosts``: of each slice, where they are not those of the options.
        """
        options = self._options
        work = Path(tempfile.mkdtemp(prefix="eckpt-recovery-", dir=options.ramdisk))
        try:
            for name in ("storage", "marks"):
                (work / name).mkdir()
            places = ["--dir", str(work / "storage"), "--marks-dir", str(work / "marks")]
            spec = JobSpec(
                command=(sys.executable, "-m", "benchmarks.recovery.worker", *worker, *places),
                slices=options.slices,
                hosts_per_slice=hosts or options.hosts_per_slice,
                devices_per_host=1,
                local_root=work / "ram",
                log_dir=work / "logs",
                env={"PYTHONPATH": str(ROOT), **environ},
                max_restarts=1,
            )
            fault = parse_fault(f"step={phases.FAULT_STEP} kill=slice:0 lose-ram exact")
            result = FaultySupervisor(spec, [fault]).run(options.timeout_s)
            if result.error is not None:
                raise RuntimeError(str(result.error))
            events = [phases.Moment(each.time_s, each.name, each.life) for each in result.events]
            return phases.recovery(events, phases.read_marks(work / "marks"))
        finally:
            shutil.rmtree(work)

    def close(self) -> None:
        """Do nothing: each job ended."""
