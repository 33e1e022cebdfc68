"""Medians and tables from the raw times of all processes. Pure."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common.contenders import RAM, STORAGE
from benchmarks.common.job import FROM_STORAGE, HALVES_LOST, NOTHING_LOST, SLICE_LOST
from benchmarks.common.tables import markdown, number

OURS = "ours"
Round = Mapping[str, Any]
"""The result of ``lives.run_round``."""
Job = Mapping[str, Any]
"""One of the ``jobs`` of ``compare.json``."""


class NotMeasured(Exception):
    """The contender has no such tier or refused, or the loss does not apply to the job."""


Pick = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Function that returns the saves of one process from its results."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure. A smaller value is better."""

    key: str
    title: str
    of_round: Callable[[Round], float]
    """Function that returns the value of one round, in seconds or times. Raises NotMeasured."""
    scenario: str | None = None
    """The loss before the measured restore, which a contender may refuse; None for a save."""


def _timed(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return _tier(result, RAM)["saves"]


def _computed(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return _tier(result, RAM)["computed"]


def _last_stored(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the last save to storage, because the first one is a warm-up."""
    return _tier(result, STORAGE)["saves"][-1:]


def _warm_up(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [_tier(result, RAM)["warm_up"]]


def _tier(result: Mapping[str, Any], tier: str) -> Mapping[str, Any]:
    if tier not in result:
        raise NotMeasured(tier)
    return result[tier]


def _events(round_: Round, pick: Pick) -> list[tuple[Mapping[str, Any], ...]]:
    """Return, for each save, the results of all processes."""
    return list(zip(*(pick(result) for result in round_["save"]), strict=True))


def _stall_s(round_: Round, pick: Pick) -> float:
    """Return the longest time of a training thread inside ``save``, median over these saves."""
    return median(
        max(e["returned_s"] - e["start_s"] for e in event) for event in _events(round_, pick)
    )


def _ready_s(round_: Round) -> float:
    """Return the longest wait of a process for a state being computed, median over the saves."""
    waits = [[each["ready_s"] for each in event] for event in _events(round_, _computed)]
    if any(wait is None for event in waits for wait in event):
        raise NotMeasured("the wait for arrays")
    return median(max(event) for event in waits)


def _published_s(round_: Round, pick: Pick) -> float:
    """Return the time from the first call until no process waits, median over these saves.

    All processes read the same monotonic clock of the same machine.
    """
    return median(
        max(e["published_s"] for e in event) - min(e["start_s"] for e in event)
        for event in _events(round_, pick)
    )


def restore_s(round_: Round, scenario: str = SLICE_LOST) -> float:
    """Return the time from the first process's building to values on the last one's devices."""
    outcome = round_["restores"].get(scenario)
    if outcome is None or "refused" in outcome:
        raise NotMeasured(scenario)
    results = outcome["processes"]
    return max(r["restored_s"] for r in results) - min(r["start_s"] for r in results)


def _restore(key: str, title: str, scenario: str) -> Measure:
    return Measure(key, title, lambda r: restore_s(r, scenario), scenario)


SHOWN = (
    Measure("stall", "stall: in save, arrays ready", lambda r: _stall_s(r, _timed)),
    Measure("computed", "in save, arrays being computed", lambda r: _stall_s(r, _computed)),
    Measure("ready", "of it, wait for the arrays", _ready_s),
    Measure("published", "until published in RAM", lambda r: _published_s(r, _timed)),
    _restore("restore_nothing_lost", "restore, nothing lost", NOTHING_LOST),
    _restore("restore_lost_slice", "restore, one slice lost", SLICE_LOST),
    _restore("restore_lost_halves", "restore, half-lost slices", HALVES_LOST),
    Measure("storage_save", "save to storage", lambda r: _published_s(r, _last_stored)),
    _restore("storage_restore", "restore from storage", FROM_STORAGE),
)
"""The rows of the table."""
MEASURES = (
    *SHOWN,
    Measure("first_over_later", "first save over later ones",
            lambda r: _published_s(r, _warm_up) / _published_s(r, _timed)),
)  # fmt: skip


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Return the median and the value of each round by measure, in seconds or times.

    The median is None when no round has a value. ``why`` is then the contender's own message if it
    refused to restore, else None.
    """
    return {measure.key: _summary(measure, rounds) for measure in MEASURES}


def _summary(measure: Measure, rounds: Sequence[Round]) -> dict[str, Any]:
    values: list[float] = []
    for round_ in rounds:
        with contextlib.suppress(NotMeasured):
            values.append(measure.of_round(round_))
    if values:
        return {"median": median(values), "rounds": values, "why": None}
    refusals = (r["restores"].get(measure.scenario, {}).get("refused") for r in rounds)
    return {"median": None, "rounds": [], "why": next(filter(None, refusals), None)}


def rows(job: Job, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the rows of a job: its name, the title, and medians with how many times ours they are.

    A row without any value is left out. ``cannot`` marks a restore that the contender refused, a
    dash a tier that a contender lacks or a loss that a job lacks.
    """
    for measure in SHOWN:
        found = {name: job["contenders"][name]["summary"][measure.key] for name in names}
        if any(summary["median"] is not None or summary["why"] for summary in found.values()):
            ours_s = found[OURS]["median"] if OURS in found else None
            cells = [_cell(summary, None if n == OURS else ours_s) for n, summary in found.items()]
            yield [job["job"]["name"], measure.title, *cells]


def _cell(summary: Mapping[str, Any], base_s: float | None) -> str:
    if (seconds := summary["median"]) is None:
        return "cannot" if summary["why"] else "-"
    shown = f"{number(seconds * 1e3)} ms" if seconds < 1 else f"{number(seconds)} s"
    return f"{shown} ({number(seconds / base_s)}x)" if base_s else shown


def table(jobs: Sequence[Job]) -> str:
    """Return Markdown: the rows of all jobs, and below them why contenders refused to restore."""
    names = list(jobs[0]["contenders"])
    found = [row for job in jobs for row in rows(job, names)]
    refusals = [
        f"{job['job']['name']}: {name} cannot: {measure.title}: {why}"
        for job in jobs
        for name, contender in job["contenders"].items()
        for measure in SHOWN
        if (why := contender["summary"][measure.key]["why"])
    ]
    text = markdown([["job", "", *names], *found])
    return "\n\n".join([text, "\n".join(refusals)]) if refusals else text


def limit_medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the GB/s of each limit, median over the rounds."""
    return {name: median(r[name] for r in rounds) for name in rounds[0]}


def limits(rounds: Sequence[Mapping[str, float]]) -> str:
    """Return the limits of the machine as one sentence."""
    rates = "; ".join(f"{name} {number(rate)}" for name, rate in limit_medians(rounds).items())
    return f"Limits of this machine, GB/s: {rates}."
