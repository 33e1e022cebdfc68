"""A job of ``benchmarks.recovery.worker`` under `eckpt launch`: processes of this machine."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.recovery.phases import SLICES, Mark, read_marks
from emergency_ckpt.tools.launch.job import JobSpec
from examples.faults.faults import Fault
from examples.faults.injection import FaultySupervisor


def run(
    worker: Sequence[str],
    *,
    hosts_per_slice: int,
    faults: Sequence[Fault],
    ramdisk: Path,
    storage: Path,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> list[Mark]:
    """Run one job to its end; return its events and the marks of its processes. Blocks.

    Args:
      worker: the worker's arguments, without its places.
      faults: after each of them the job starts again.
      ramdisk, storage: in which the hosts' ramdisks and the persistent directory are made and
        removed.

    Raises:
      RuntimeError: the job did not come to its end; with the end of a log.
    """
    with (
        tempfile.TemporaryDirectory(prefix="eckpt-recovery-", dir=ramdisk) as work,
        tempfile.TemporaryDirectory(prefix="eckpt-recovery-", dir=storage) as stored,
    ):
        marks_dir = Path(work, "marks")
        marks_dir.mkdir()
        places = ["--marks-dir", str(marks_dir), "--dir", stored]
        spec = JobSpec(
            command=(sys.executable, "-m", "benchmarks.recovery.worker", *worker, *places),
            slices=SLICES,
            hosts_per_slice=hosts_per_slice,
            devices_per_host=1,
            local_root=Path(work, "ram"),
            log_dir=Path(work, "logs"),
            env={"PYTHONPATH": str(ROOT), **(environ or {})},
            max_restarts=len(faults),
        )
        result = FaultySupervisor(spec, faults).run(timeout_s)
        if result.error is not None:
            raise RuntimeError(str(result.error))
        events = [Mark(event.time_s, event.name, event.life) for event in result.events]
        return [*events, *read_marks(marks_dir)]
