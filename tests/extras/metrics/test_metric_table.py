"""The table of metrics: its events exist, its names follow the rules, and the page has it whole."""

from __future__ import annotations

import re
from pathlib import Path

from emergency_ckpt.extras.metrics import METRICS, samples_of

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_page_lists_each_metric_and_no_other() -> None:
    table = [[m.name, "gauge" if m.kind == "age" else m.kind, m.label, m.meaning] for m in METRICS]
    page = OPERATIONS.read_text("utf-8").split("| metric | type | label | meaning |\n")[1]
    lines = [line for line in page.split("\n\n")[0].splitlines() if line.startswith("| `")]
    assert [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines] == table


def test_table_events_and_fields_are_those_of_the_page() -> None:
    page = OPERATIONS.read_text("utf-8").split("| event | fields | meaning |")[1]
    fields: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            _, names, values, *_ = line.split("|")
            for name in re.findall(r"`([a-z_.]+)`", names):
                fields[name] = values
    for metric in METRICS:
        for source in metric.sources:
            wanted = [source.field, *re.findall(r"{(\w+)}", source.label)]
            listed = re.findall(r"\w+", fields[source.event])
            assert {name for name in wanted if name} <= set(listed), (metric.name, source.event)


def test_table_names_are_base_units_with_few_labels() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"eckpt_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind not in ("histogram", "age")) or metric.name.endswith("_seconds")
        labels = [source.label for source in metric.sources]
        assert all(labels) if metric.label else not any(labels)


def test_samples_of_a_restore() -> None:
    fields = {
        "step": 20,
        "tier": "local",
        "seconds": 0.5,
        "bytes_local": 1,
        "bytes_peer": 2,
        "bytes_persistent": 3,
    }
    found = {(s.metric.name, s.label): s.value for s in samples_of("restore.finished", fields, 9.0)}
    assert found == {
        ("eckpt_newest_step", "local"): 20,
        ("eckpt_newest_step_age_seconds", "local"): 9.0,
        ("eckpt_restore_seconds", "local"): 0.5,
        ("eckpt_restored_bytes_total", "own_ram"): 1,
        ("eckpt_restored_bytes_total", "peers"): 2,
        ("eckpt_restored_bytes_total", "storage"): 3,
        ("eckpt_last_restore_seconds", ""): 0.5,
        ("eckpt_restored_step", ""): 20,
    }


def test_samples_of_odd_fields_are_none() -> None:
    odd = {"step": None, "tier": "x", "seconds": "soon", "bytes_local": True}
    names = {sample.metric.name for sample in samples_of("restore.finished", odd, 1.0)}
    assert names == {"eckpt_newest_step_age_seconds"}
    assert list(samples_of("save.some_new_thing", {}, 1.0)) == []
