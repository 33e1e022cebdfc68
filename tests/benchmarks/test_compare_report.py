"""The arithmetic of the comparison, on times made up by hand."""

from typing import Any

import pytest
from benchmark_runs import rows_of

from benchmarks.compare import report


def _save(
    start_s: float, returned_s: float, published_s: float, *, cpu_s: float = 0.25, received: int = 0
) -> dict[str, Any]:
    return {
        "start_s": start_s,
        "returned_s": returned_s,
        "published_s": published_s,
        "cpu_s": cpu_s,
        "traffic_before": {"lo": [1000, 7], "eth0": [5, 5]},
        "traffic_after": {"lo": [1000 + received, 9], "eth0": [500, 500]},
    }


def _computed(start_s: float, returned_s: float, ready_s: float | None) -> dict[str, Any]:
    return {"start_s": start_s, "returned_s": returned_s, "ready_s": ready_s}


def _restore(start_s: float, restored_s: float, peak_rss_bytes: int) -> dict[str, Any]:
    return _save(start_s, start_s, start_s, received=7 * 2**20) | {
        "restored_s": restored_s,
        "peak_rss_bytes": peak_rss_bytes,
    }


def _round(*, scale: float = 1.0) -> dict[str, Any]:
    """Two processes; the second is slower to return, the first to start."""
    first = {
        "warm_up": _save(0.0, 1.0 * scale, 2.0 * scale),
        "saves": [
            _save(10.0, 10.0 + 0.1 * scale, 10.0 + 0.1 * scale),
            _save(20.0, 20.0 + 0.5 * scale, 20.0 + 1.0 * scale),
            _save(30.0, 30.0 + 0.1 * scale, 30.0 + 3.0 * scale, received=2 * 2**20),
        ],
        "computed": [_computed(35.0, 35.0 + 2.0 * scale, 1.9 * scale)],
        "ramdisk_bytes": 0,
        "peak_rss_bytes": 100 * 2**20,
    }
    second = {
        "warm_up": _save(0.0, 1.0 * scale, 1.0 * scale),
        "saves": [
            _save(10.0, 10.0 + 0.2 * scale, 10.0 + 2.0 * scale, cpu_s=0.75),
            _save(20.0, 20.0 + 0.2 * scale, 20.0 + 0.5 * scale, cpu_s=1.75),
            _save(30.0, 30.0 + 0.3 * scale, 30.0 + 0.6 * scale),
        ],
        "computed": [_computed(35.0, 35.0 + 2.5 * scale, 1.8 * scale)],
        "ramdisk_bytes": 2**20,
        "peak_rss_bytes": 200 * 2**20,
    }
    restored = [
        _restore(50.0, 50.0 + 3.0 * scale, 2**20),
        _restore(51.0, 51.0 + 4.0 * scale, 2**21),
    ]
    return {
        "state_bytes": 2**29,
        "host_bytes": 100 * 2**20,
        "save": [{"ram": first}, {"ram": second}],
        "restores": {
            "slice": {"processes": restored},
            "halves": {"refused": "offers step None", "processes": []},
        },
    }


def _stored_round(seconds: float) -> dict[str, Any]:
    """A contender without a RAM tier."""
    saves = [_save(0.0, 9.0, 99.0), _save(100.0, 101.0, 100.0 + seconds, cpu_s=2.0)]
    storage = {"saves": saves, "peak_rss_bytes": 2**30}
    return {
        "state_bytes": 2**29,
        "host_bytes": 100 * 2**20,
        "save": [{"storage": storage}],
        "restores": {"storage": {"processes": [_restore(0.0, seconds, 2**20)]}},
    }


def test_save_of_unready_arrays_has_its_wait_for_them_apart() -> None:
    summary = report.summarize([_round()])
    assert summary["computed"]["rounds"] == pytest.approx([2.5])
    assert summary["ready"]["rounds"] == pytest.approx([1.9])


def test_contender_that_does_not_tell_its_wait_has_none() -> None:
    round_ = _round()
    round_["save"][1]["ram"]["computed"][0]["ready_s"] = None
    summary = report.summarize([round_])
    assert summary["ready"]["median"] is None
    assert summary["computed"]["median"] == pytest.approx(2.5)


def test_missing_figure_is_a_dash_and_a_refusal_has_its_reason() -> None:
    summaries = {
        "ours": report.summarize([_round()]),
        "plain": report.summarize([_stored_round(4.0)]),
    }
    assert summaries["plain"]["stall"]["median"] is None
    table, refusals = report.table(summaries, "ours").split("\n\n")
    cells = {row[0]: row[1:] for row in rows_of(table)}
    assert cells["stall: in save, arrays ready, ms"] == ["300", "-", "-"]
    assert cells["restore, half-lost slices, s"] == ["cannot", "-", "-"]
    assert cells["save to storage, s"] == ["-", "4", "-"]
    assert "restore, nothing lost, s" not in cells
    assert "ours cannot: restore, half-lost slices: offers step None" in refusals


def test_table_as_a_whole() -> None:
    summaries = {
        "ours": report.summarize([_round(scale=0.1), _round(scale=0.3)]),
        "other": report.summarize([_round(scale=1.0)]),
    }
    table = report.table(summaries, "ours").partition("\n\n")[0]
    assert len({len(line) for line in table.splitlines()}) == 1
    cells = rows_of(table)
    assert cells[0] == ["median (least to most)", "ours", "other", "other / ours"]
    assert cells[2] == ["stall: in save, arrays ready, ms", "60 (30 to 90)", "300", "5x"]
    assert cells[6] == ["until published in RAM, s", "0.4 (0.2 to 0.6)", "2", "5x"]
