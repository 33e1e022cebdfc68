"""The arithmetic of the comparison, on times made up by hand."""

from typing import Any

import pytest
from benchmark_runs import rows_of

from benchmarks.compare import report


def _save(start_s: float, returned_s: float, published_s: float) -> dict[str, Any]:
    return {"start_s": start_s, "returned_s": returned_s, "published_s": published_s}


def _computed(start_s: float, returned_s: float, ready_s: float | None) -> dict[str, Any]:
    return {"start_s": start_s, "returned_s": returned_s, "ready_s": ready_s}


def _restore(start_s: float, restored_s: float) -> dict[str, Any]:
    return {"start_s": start_s, "restored_s": restored_s}


def _round(*, scale: float = 1.0) -> dict[str, Any]:
    """Two processes; the second is slower to return, the first to start."""
    first = {
        "warm_up": _save(0.0, 1.0 * scale, 2.0 * scale),
        "saves": [
            _save(10.0, 10.0 + 0.1 * scale, 10.0 + 0.1 * scale),
            _save(20.0, 20.0 + 0.5 * scale, 20.0 + 1.0 * scale),
            _save(30.0, 30.0 + 0.1 * scale, 30.0 + 3.0 * scale),
        ],
        "computed": [_computed(35.0, 35.0 + 2.0 * scale, 1.9 * scale)],
    }
    second = {
        "warm_up": _save(0.0, 1.0 * scale, 1.0 * scale),
        "saves": [
            _save(10.0, 10.0 + 0.2 * scale, 10.0 + 2.0 * scale),
            _save(20.0, 20.0 + 0.2 * scale, 20.0 + 0.5 * scale),
            _save(30.0, 30.0 + 0.3 * scale, 30.0 + 0.6 * scale),
        ],
        "computed": [_computed(35.0, 35.0 + 2.5 * scale, 1.8 * scale)],
    }
    restored = [
        _restore(50.0, 50.0 + 3.0 * scale),
        _restore(51.0, 51.0 + 4.0 * scale),
    ]
    return {
        "save": [{"ram": first}, {"ram": second}],
        "restores": {
            "slice": {"processes": restored},
            "halves": {"refused": "offers step None", "processes": []},
        },
    }


def _stored_round(seconds: float) -> dict[str, Any]:
    """A contender without a RAM tier."""
    saves = [_save(0.0, 9.0, 99.0), _save(100.0, 101.0, 100.0 + seconds)]
    return {
        "save": [{"storage": {"saves": saves}}],
        "restores": {"storage": {"processes": [_restore(0.0, seconds)]}},
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


def _job(**rounds: list[dict[str, Any]]) -> dict[str, Any]:
    contenders = {name: {"summary": report.summarize(some)} for name, some in rounds.items()}
    return {"job": {"name": "2x1x512/16"}, "contenders": contenders}


def test_missing_figure_is_a_dash_and_a_refusal_has_its_reason() -> None:
    job = _job(ours=[_round()], plain=[_stored_round(4.0)])
    table, refusals = report.table([job]).split("\n\n")
    cells = {row[1]: row[2:] for row in rows_of(table)}
    assert cells["stall: in save, arrays ready"] == ["300 ms", "-"]
    assert cells["restore, half-lost slices"] == ["cannot", "-"]
    assert cells["save to storage"] == ["-", "4 s"]
    assert "restore, nothing lost" not in cells
    assert refusals == "2x1x512/16: ours cannot: restore, half-lost slices: offers step None"


def test_table_as_a_whole() -> None:
    job = _job(ours=[_round(scale=0.1), _round(scale=0.3)], other=[_round(scale=1.0)])
    table = report.table([job]).partition("\n\n")[0]
    assert len({len(line) for line in table.splitlines()}) == 1
    cells = rows_of(table)
    assert cells[0] == ["job", "", "ours", "other"]
    assert cells[2] == [
        *("2x1x512/16", "stall: in save, arrays ready"),
        *("60 ms", "300 ms (5x)"),
    ]
    assert cells[5][1:] == ["until published in RAM", "400 ms", "2 s (5x)"]


def test_first_save_is_compared_with_the_later_ones_of_its_round() -> None:
    assert report.summarize([_round()])["first_over_later"]["rounds"] == pytest.approx([1.0])
