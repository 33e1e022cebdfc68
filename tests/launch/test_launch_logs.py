"""Directories with logs: they go after a success."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from looks import eckpt_here


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
