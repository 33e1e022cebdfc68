"""The arithmetic of the study of continuous saving, on times made up by hand."""

from typing import Any

import pytest
from benchmark_runs import refusal, rows_of

from benchmarks.continuous import __main__ as continuous
from benchmarks.continuous import report, study


def _process(
    ended_s: list[float], called_s: dict[str, float], whole_s: dict[str, float], lost: int = 0
) -> dict[str, Any]:
    return {
        "ended_s": ended_s,
        "called_s": called_s,
        "whole_s": whole_s,
        "lost": ["save.incomplete"] * lost,
        "restored_step": max((int(step) for step in whole_s), default=None),
    }


def _run(*, step_s: float = 1.0, saved: bool = True) -> report.Run:
    """Warm-up ends at 100; ten steps follow. The second process is a little behind."""
    first = [100 + step_s * i for i in range(11)]
    second = [time_s + 0.1 for time_s in first]
    if not saved:
        return [_process(first, {}, {}), _process(second, {}, {})]
    called = {"8": 98.0, "10": 101.0, "13": 104.0, "19": 110.0}
    whole = {"8": 99.0, "10": 102.0, "13": 104.5, "19": 110.5}
    behind = {step: time_s + 0.2 for step, time_s in called.items()}
    # Step 19 is not whole at the second process.
    at_second = {"8": 99.0, "10": 102.5, "13": 104.4}
    return [_process(first, called, whole), _process(second, behind, at_second, lost=1)]


def test_only_saves_of_all_processes_after_the_warm_up_count() -> None:
    figures = report.figures(_run())
    assert figures.interval_steps == [3]
    assert figures.intervals_s == pytest.approx([3.0])
    # From the first call to the last process's word.
    assert figures.publish_s == pytest.approx([1.5, 0.5])
    assert figures.lost_saves == 1


def _summaries() -> dict[str, report.Summary]:
    return report.summarize(
        {
            study.LOCAL_EVERY: [_run(step_s=1.0), _run(step_s=1.2), _run(step_s=1.1)],
            study.OFF: [_run(step_s=1.0, saved=False)],
        }
    )


def test_tables_as_a_whole() -> None:
    summaries = _summaries()
    rows = rows_of(report.study_table(summaries))
    assert rows[2] == ["off", "-", "-", "1000", "0.00", "-", "0", "0"]
    assert rows[3] == ["local-every", "3", "3", "1100", "10.00", "1", "6", "3"]
    losses = report.loss_table(report.expectations(summaries, [3.0], 128))
    assert len(losses.splitlines()) == 3


@pytest.mark.parametrize(
    ("variant", "local_on", "persistent_on"),
    [
        (study.OFF, False, False),
        (study.LOCAL_EVERY, True, False),
        (study.LOCAL_CONTINUOUS, True, False),
        (study.PERSISTENT_EVERY, False, True),
        (study.PERSISTENT_CONTINUOUS, False, True),
        (study.BOTH_CONTINUOUS, True, True),
    ],
)
def test_each_variant_has_the_tiers_that_it_names(
    variant: str, local_on: bool, persistent_on: bool
) -> None:
    shape = continuous.plan_shape(2, 1, 1, 1, 1)
    orders = study.Orders(variant, shape, 100, 0.0, 1, 1, 0.0, "/p", "/r")
    settings = orders.settings("a policy")
    local = settings["local_save_every"]
    persistent = settings["save_every"]
    assert (bool(local), bool(persistent)) == (local_on, persistent_on)
    assert ("a policy" in settings.values()) == variant.endswith("continuous")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "off,never"], "never"),
        (["--mtbf-h", "1,0"], "above 0"),
        (["--device-ms", "nan"], "no finite number"),
        (["--slices", "1"], "at least 2"),
        (["--mib", str(2**30)], "choose a smaller state"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_it_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(continuous.main, arguments, capsys)
