"""The file in which a process reports its steps, and by which it is held at one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launch_support import wait_until

from emergency_ckpt.extras.progress import NO_STEP, ProgressFile


def test_progress_is_seen_by_the_other_side(tmp_path: Path) -> None:
    seen = ProgressFile(tmp_path / "progress", create=True)
    assert seen.step == NO_STEP
    program = "from emergency_ckpt.extras.progress import report_step; report_step(2**40)"
    subprocess.run(
        [sys.executable, "-c", program],
        env={"ECKPT_PROGRESS_PATH": str(tmp_path / "progress"), "PYTHONPATH": ":".join(sys.path)},
        check=True,
        timeout=60,
    )
    assert seen.step == 2**40
    seen.close()


def test_hold_stops_the_process_at_its_step(tmp_path: Path) -> None:
    supervisor_side = ProgressFile(tmp_path / "progress", create=True)
    process_side = ProgressFile(tmp_path / "progress")
    supervisor_side.hold_at(5)
    past = threading.Event()

    def work() -> None:
        for step in range(8):
            process_side.report(step)
        past.set()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    wait_until(lambda: supervisor_side.step == 5, "the process is at its step")
    assert not past.wait(0.2)
    assert supervisor_side.step == 5
    supervisor_side.hold_at(NO_STEP)
    assert past.wait(30)
    assert supervisor_side.step == 7
    worker.join(30)


def test_file_that_is_no_progress_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "progress").write_bytes(b"12345678")
    with pytest.raises(OSError, match="not a progress file"):
        ProgressFile(tmp_path / "progress")
