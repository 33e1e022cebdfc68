"""A demonstration of all scenarios that is stopped leaves the results of those that ran."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from demo_support import baseline, faulty
from rich.console import Console

from examples.demo import run
from examples.demo.demo_report import FinishedRun
from examples.demo.scenarios import ALL, SCENARIOS


def test_run_demo_stopped_leaves_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = iter([baseline(), faulty()])

    def one_run(*_: Any) -> FinishedRun:
        record = next(records, None)
        if record is None:
            raise SystemExit(130)  # as SIGINT
        return record

    monkeypatch.setattr(run, "run_once", one_run)
    options = run.DemoOptions(scenario=ALL, out=tmp_path / "out")
    with pytest.raises(SystemExit) as stopped:
        run.run_demo(options, Console(file=io.StringIO()))
    assert stopped.value.code == 130
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    first, *others = SCENARIOS
    assert [each["scenario"] for each in summary["scenarios"]] == [first]
    assert summary["not_run"] == others
    assert (tmp_path / "out" / "loss.png").exists()
