"""The table of metrics: its names follow the rules, and its samples are those of the events."""

from __future__ import annotations

import re

import pytest

from emergency_ckpt.extras.metrics import METRICS, samples_of


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


@pytest.mark.parametrize(
    ("name", "cause", "counted"),
    [
        ("persistent.problem", "unreachable", [("eckpt_unreachable_total", "storage")]),
        ("persistent.problem", "waiting", []),
        ("preemption.missed", "not_written", [("eckpt_failed_saves_total", "preempted")]),
        ("preemption.missed", "no_save", []),
        ("ram.off", "full", [("eckpt_ramdisk_full_total", "")]),
        ("ram.off", "given_up", []),
    ],
)
def test_events_of_one_name_count_by_cause(
    name: str, cause: str, counted: list[tuple[str, str]]
) -> None:
    samples = samples_of(name, {"cause": cause, "reason": "no route", "step": 3}, 1.0)
    assert [(sample.metric.name, sample.label) for sample in samples] == counted


def test_samples_of_odd_fields_are_none() -> None:
    odd = {"step": None, "tier": "x", "seconds": "soon", "bytes_local": True}
    names = {sample.metric.name for sample in samples_of("restore.finished", odd, 1.0)}
    assert names == {"eckpt_newest_step_age_seconds"}
    assert list(samples_of("save.some_new_thing", {}, 1.0)) == []
