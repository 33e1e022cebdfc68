"""Directories with logs: they go after a success, and do not pile up."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from looks import eckpt_here

from emergency_ckpt.tools.launch.logs import KEPT_DIRECTORIES, temporary_logs


def test_temporary_logs_keep_the_newest_and_those_in_use(tmp_path: Path) -> None:
    stranger = tmp_path / "eckpt-logs-file"
    stranger.write_text("no directory")
    os.utime(stranger, (1, 1))
    with temporary_logs(tmp_path) as in_use:
        os.utime(in_use, (2, 2))
        made: list[Path] = []
        for number in range(KEPT_DIRECTORIES + 5):
            with temporary_logs(tmp_path) as logs:
                (logs / "process_00000.log").write_text("it failed")
            os.utime(logs, (100 + number, 100 + number))
            made.append(logs)
        left = set(tmp_path.iterdir())
        assert {stranger, in_use, *made[-KEPT_DIRECTORIES:]} == left
    assert not in_use.exists(), "it is empty"


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.process  # by the name of a command
def test_launch_logs_stay_after_a_failure_only(
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = ["/bin/sh", "-c", f"echo said; exit {status}"]
    options = ["--slices", "1", "--hosts-per-slice", "1", "--max-restarts", "0"]
    assert eckpt_here("launch", *options, "--", *program) == status
    logs = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")]
    kept = ["events_launcher.jsonl", "process_00000.log"] if status else []
    assert sorted(path.name for path in logs) == kept
    assert re.search(r"life\.ended .*seconds=\d+\.\d", capfd.readouterr().err)
