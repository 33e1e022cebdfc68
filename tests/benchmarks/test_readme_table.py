"""The tables of README and RESULTS: made from what was measured, and nothing else is touched."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import rows_of

from benchmarks.compare import readme_table
from benchmarks.compare.readme_table import BEGIN, END

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md")


def _summary(**medians: float) -> dict[str, Any]:
    keys = [
        *("stall", "computed", "ready", "published", "restore_nothing_lost", "restore_lost_slice"),
        *("restore_lost_halves", "storage_save", "storage_restore"),
    ]
    return {"summary": {key: {"median": medians.get(key), "why": None} for key in keys}}


DOCUMENT = {
    "date": "2001-02-03",
    "machine": {"cores": 2, "cpu": "a CPU", "memory": "24 GiB"},
    "limits_gb_per_s": [{"memcpy": 8.0}, {"memcpy": 10.0}, {"memcpy": 9.0}],
    "jobs": [
        {
            "job": {"name": "2x1x1024/16", "slices": 2, "state_bytes": 2**30},
            "contenders": {
                "ours": _summary(
                    stall=0.002, computed=0.05, ready=0.048, published=0.2, storage_save=4.0
                ),
                "orbax-emergency": _summary(stall=0.1, computed=0.15, published=3.0),
                "orbax": _summary(storage_save=2.0),
            },
        }
    ],
}


def test_medians_are_shown_with_how_many_times_ours_they_are() -> None:
    cells = [row for row in rows_of(readme_table.section(DOCUMENT)) if len(row) > 1]
    assert cells[0] == ["job", "", "ours", "orbax-emergency", "orbax"]
    stall, computed, ready, published, stored = cells[2:]
    assert stall == [
        *("2x1x1024/16", "stall: in save, arrays ready"),
        *("2 ms", "100 ms (50x)", "-"),
    ]
    assert computed[1:] == ["in save, arrays being computed", "50 ms", "150 ms (3x)", "-"]
    assert ready[1:] == ["of it, wait for the arrays", "48 ms", "-", "-"]
    assert published[2:] == ["200 ms", "3 s (15x)", "-"]
    assert stored[1:] == ["save to storage", "4 s", "-", "2 s (0.5x)"]


def test_tables_name_the_commit_where_it_is_known() -> None:
    known = DOCUMENT | {"machine": DOCUMENT["machine"] | {"commit": "0123abc"}}
    for text in (readme_table.section, readme_table.summary):
        assert "2001-02-03, commit 0123abc. " in text(known)
        assert "2001-02-03. " in text(DOCUMENT)


def test_limits_are_medians_over_the_rounds() -> None:
    assert "memcpy 9." in readme_table.section(DOCUMENT)


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    documents = paths(tmp_path)
    for path in documents:
        path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "compare.json").write_text(json.dumps(DOCUMENT))
    for _ in range(2):
        assert readme_table.main(arguments(tmp_path)) == 0
        for path in documents:
            text = path.read_text()
            assert text.startswith(f"before\n{BEGIN}\n2 cores, a CPU")
            assert text.endswith(f"{END}\nafter\n")
            assert "old" not in text


def test_without_marks_or_figures_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = paths(tmp_path)
    for path in documents:
        path.write_text("nothing to replace\n")
    for text in ("{}", "no JSON", json.dumps(DOCUMENT)):
        (tmp_path / "compare.json").write_text(text)
        with pytest.raises(SystemExit):
            readme_table.main(arguments(tmp_path))
        assert "cannot write the table" in capsys.readouterr().err
        assert [path.read_text() for path in documents] == 2 * ["nothing to replace\n"]


def test_readme_and_results_have_the_marks() -> None:
    for path in DOCUMENTS:
        assert readme_table.with_table(path.read_text(), "x").count("measured: ") == 2


def test_summary_has_the_first_job_alone() -> None:
    lines = readme_table.summary(DOCUMENT).splitlines()
    assert "A state of 1 GiB on 2 slices" in lines[0]
    assert rows_of(lines[4])[0] == ["stall: in save, arrays ready", "2 ms", "100 ms (50x)", "-"]


def test_tables_say_what_the_stall_is_and_what_is_none() -> None:
    for text in (readme_table.section, readme_table.summary):
        assert "as the next step would do without a save" in text(DOCUMENT)


def paths(directory: Path) -> tuple[Path, Path]:
    return directory / "README.md", directory / "RESULTS.md"


def arguments(directory: Path) -> list[str]:
    readme, results = paths(directory)
    return [
        *("--json", str(directory / "compare.json")),
        *("--readme", str(readme), "--results", str(results)),
    ]
