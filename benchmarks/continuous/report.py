"""Intervals, step times and losses from the raw times of the study. Pure."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.tables import markdown, number
from benchmarks.continuous.study import OFF, VARIANTS
from benchmarks.goodput.closed_form import Loss, expected_loss_of_intervals_s, loss_per_failure

Run = Sequence[Mapping[str, Any]]
"""Results that ``worker.py`` wrote, by process."""


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """One run of one variant. Each list has one entry per interval or per save."""

    mean_step_s: float
    interval_steps: list[int]
    intervals_s: list[float]
    publish_s: list[float]
    lost_saves: int


def figures(run: Run) -> RunFigures:
    """Return the figures of a run.

    A save counts when all processes report it; it is complete when the last one does. Only saves of
    steps after the warm-up count. All processes read one monotonic clock.
    """
    begun_s, *_, done_s = _slowest([process["ended_s"] for process in run])
    steps = len(run[0]["ended_s"]) - 1
    common = set.intersection(*(set(process["whole_s"]) for process in run))
    called_s = {step: min(process["called_s"][step] for process in run) for step in common}
    saved = sorted((step for step in common if called_s[step] >= begun_s), key=int)
    whole_s = {step: max(process["whole_s"][step] for process in run) for step in saved}
    pairs = list(itertools.pairwise(saved))
    return RunFigures(
        mean_step_s=(done_s - begun_s) / steps,
        interval_steps=[int(after) - int(before) for before, after in pairs],
        intervals_s=[called_s[after] - called_s[before] for before, after in pairs],
        publish_s=[whole_s[step] - called_s[step] for step in saved],
        lost_saves=max(len(process["lost"]) for process in run),
    )


def _slowest(by_process: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*by_process, strict=True)]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Medians of one variant over all rounds. Without two saves there are no intervals."""

    mean_step_s: float
    step_increase: float | None
    """Increase relative to training that never saves; None when that was not run."""
    median_interval_steps: float | None
    median_interval_s: float | None
    median_publish_s: float | None
    loss_of_all_intervals_s: float | None
    """Loss per rare failure from the unequal intervals. Half the median is an estimate of it."""
    saves: int
    lost_saves: int


def summarize(rounds: Mapping[str, Sequence[Run]]) -> dict[str, Summary]:
    """Return the summary of each variant, in the order of ``VARIANTS``."""
    by_variant = {v: [figures(run) for run in rounds[v]] for v in VARIANTS if v in rounds}
    steps_s = {
        variant: statistics.median(run.mean_step_s for run in runs)
        for variant, runs in by_variant.items()
    }
    base_s = steps_s.get(OFF)
    return {v: _summary(runs, steps_s[v], base_s) for v, runs in by_variant.items()}


def _summary(runs: Sequence[RunFigures], step_s: float, base_s: float | None) -> Summary:
    interval_steps = [n for run in runs for n in run.interval_steps]
    intervals_s = [t for run in runs for t in run.intervals_s]
    publish_s = [t for run in runs for t in run.publish_s]
    publish = statistics.median(publish_s) if publish_s else None
    return Summary(
        mean_step_s=step_s,
        step_increase=None if base_s is None else step_s / base_s - 1,
        median_interval_steps=statistics.median(interval_steps) if interval_steps else None,
        median_interval_s=statistics.median(intervals_s) if intervals_s else None,
        median_publish_s=publish,
        loss_of_all_intervals_s=expected_loss_of_intervals_s(intervals_s, publish or 0.0)
        if intervals_s
        else None,
        saves=len(publish_s),
        lost_saves=sum(run.lost_saves for run in runs),
    )


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Expected cost of failures for a variant that saves at its median interval."""

    variant: str
    mtbf_h: float
    loss: Loss
    chip_hours_per_day: float
    waste: float | None
    """Share of the time lost to slower steps and to failures; None without a base."""


def expectations(
    summaries: Mapping[str, Summary], mtbfs_h: Sequence[float], chips: int
) -> list[Expectation]:
    """Return one for each variant that saves and each mean time between failures."""
    found = []
    for mtbf_h in mtbfs_h:
        for variant, summary in summaries.items():
            interval_s, publish_s = summary.median_interval_s, summary.median_publish_s
            if interval_s is None or publish_s is None:
                continue
            mtbf_s = mtbf_h * 3600
            loss = loss_per_failure(
                interval_s, summary.mean_step_s, chips, mtbf_s, publish_s=publish_s
            )
            slower = summary.step_increase
            waste = None if slower is None else slower / (1 + slower) + loss.seconds / mtbf_s
            found.append(Expectation(variant, mtbf_h, loss, loss.chip_hours * 24 / mtbf_h, waste))
    return found


def study_table(summaries: Mapping[str, Summary]) -> str:
    header = [
        "saving", "median interval, steps", "median interval, s", "mean step, ms",
        "increase, %", "until whole, s", "whole saves", "saves lost",
    ]  # fmt: skip
    return markdown(
        [header]
        + [
            [
                variant,
                _or_dash(s.median_interval_steps),
                _or_dash(s.median_interval_s),
                number(s.mean_step_s * 1e3),
                "-" if s.step_increase is None else f"{100 * s.step_increase:.2f}",
                _or_dash(s.median_publish_s),
                str(s.saves),
                str(s.lost_saves),
            ]
            for variant, s in summaries.items()
        ]
    )


def loss_table(expected: Sequence[Expectation]) -> str:
    header = [
        "saving", "MTBF, h", "loss per failure, steps", "chip hours", "chip hours per day",
        "time wasted, %",
    ]  # fmt: skip
    return markdown(
        [header]
        + [
            [
                e.variant,
                number(e.mtbf_h),
                number(e.loss.steps),
                number(e.loss.chip_hours),
                number(e.chip_hours_per_day),
                "-" if e.waste is None else f"{100 * e.waste:.2f}",
            ]
            for e in expected
        ]
    )


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)
