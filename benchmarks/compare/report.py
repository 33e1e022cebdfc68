"""Medians, ratios and a table from the raw times of all processes. Pure."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common.contenders import RAM, STORAGE
from benchmarks.common.job import FROM_STORAGE, HALVES_LOST, NOTHING_LOST, SLICE_LOST
from benchmarks.common.tables import markdown, number
from benchmarks.common.traffic import LOOPBACK, RECEIVED

Round = Mapping[str, Any]
"""The result of ``lives.run_round``."""


class NotMeasured(Exception):
    """The contender has no such tier or refused, or the loss does not apply to the job."""


Pick = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Function that returns the saves of one process from its results."""

_UNITS = {"s": 1.0, "ms": 1e-3, "MiB": 2**20, "x": 1.0}


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the table. In every row a smaller value is better."""

    key: str
    title: str
    unit: str
    of_round: Callable[[Round], float]
    """Function that returns the value of one round, in s, bytes or times. Raises NotMeasured."""
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


def stalls_s(round_: Round, pick: Pick = _timed) -> list[float]:
    """Return, for each of these saves, the longest time of a training thread inside ``save``."""
    return [max(e["returned_s"] - e["start_s"] for e in event) for event in _events(round_, pick)]


def ready_s(round_: Round) -> list[float]:
    """Return, for each save of a state being computed, the longest wait of a process for that."""
    waits = [[each["ready_s"] for each in event] for event in _events(round_, _computed)]
    if any(wait is None for event in waits for wait in event):
        raise NotMeasured("the wait for arrays")
    return [max(event) for event in waits]


def published_s(round_: Round, pick: Pick = _timed) -> list[float]:
    """Return, for each timed save, the time from the first call until no process waits for it.

    All processes read the same monotonic clock of the same machine.
    """
    return [
        max(e["published_s"] for e in event) - min(e["start_s"] for e in event)
        for event in _events(round_, pick)
    ]


def cpu_s_per_gib(round_: Round, pick: Pick = _timed) -> list[float]:
    """Return, for each timed save, the CPU time of all processes per GiB of the state."""
    gib = round_["state_bytes"] / 2**30
    return [sum(e["cpu_s"] for e in event) / gib for event in _events(round_, pick)]


def _over_loopback(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the bytes over the loopback; all processes read its counter, at different times."""
    first = min(e["traffic_before"][LOOPBACK][RECEIVED] for e in events)
    return max(e["traffic_after"][LOOPBACK][RECEIVED] for e in events) - first


def restore_s(round_: Round, scenario: str = SLICE_LOST) -> float:
    """Return the time from the first process's building to values on the last one's devices."""
    results = _restored(round_, scenario)
    return max(r["restored_s"] for r in results) - min(r["start_s"] for r in results)


def _restored(round_: Round, scenario: str) -> Sequence[Mapping[str, Any]]:
    outcome = round_["restores"].get(scenario)
    if outcome is None or "refused" in outcome:
        raise NotMeasured(scenario)
    return outcome["processes"]


def _peak_rss(round_: Round, tier: str) -> float:
    """Return the largest resident set over the state on the devices of one host."""
    most_bytes = max(_tier(result, tier)["peak_rss_bytes"] for result in round_["save"])
    return most_bytes / round_["host_bytes"]


def _peak_rss_restoring(round_: Round) -> float:
    lives = [life["processes"] for life in round_["restores"].values() if "refused" not in life]
    if not lives:
        raise NotMeasured("any restore")
    most_bytes = max(result["peak_rss_bytes"] for life in lives for result in life)
    return most_bytes / round_["host_bytes"]


def _first_published_s(round_: Round) -> float:
    return published_s(round_, _warm_up)[0]


def _restore(key: str, title: str, scenario: str) -> Measure:
    return Measure(key, title, "s", lambda r: restore_s(r, scenario), scenario)


def _received(key: str, title: str, scenario: str) -> Measure:
    return Measure(key, title, "MiB", lambda r: _over_loopback(_restored(r, scenario)), scenario)


MEASURES = (
    Measure("stall", "stall: in save, arrays ready", "ms", lambda r: median(stalls_s(r))),
    Measure("stall_worst", "stall: in save, arrays ready, worst", "ms",
            lambda r: max(stalls_s(r))),
    Measure("computed", "in save, arrays being computed", "ms",
            lambda r: median(stalls_s(r, _computed))),
    Measure("ready", "of it, wait for the arrays", "ms", lambda r: median(ready_s(r))),
    Measure("published", "until published in RAM", "s", lambda r: median(published_s(r))),
    Measure("published_worst", "until published in RAM, worst", "s",
            lambda r: max(published_s(r))),
    Measure("published_first", "until published, first save", "s", _first_published_s),
    Measure("first_over_later", "first save over later ones", "x",
            lambda r: _first_published_s(r) / median(published_s(r))),
    Measure("save_cpu", "CPU time of a save per GiB of state", "s",
            lambda r: median(cpu_s_per_gib(r))),
    Measure("save_received", "between processes, one save", "MiB",
            lambda r: median(map(_over_loopback, _events(r, _timed)))),
    _restore("restore_nothing_lost", "restore, nothing lost", NOTHING_LOST),
    _restore("restore_lost_slice", "restore, one slice lost", SLICE_LOST),
    _restore("restore_lost_halves", "restore, half-lost slices", HALVES_LOST),
    _received("received_nothing_lost", "between processes, nothing lost", NOTHING_LOST),
    _received("received_lost_slice", "between processes, one slice lost", SLICE_LOST),
    _received("received_lost_halves", "between processes, half-lost slices", HALVES_LOST),
    Measure("storage_stall", "save to storage, stall", "ms",
            lambda r: stalls_s(r, _last_stored)[0]),
    Measure("storage_save", "save to storage", "s", lambda r: published_s(r, _last_stored)[0]),
    Measure("storage_cpu", "CPU time of a save to storage per GiB of state", "s",
            lambda r: cpu_s_per_gib(r, _last_stored)[0]),
    _restore("storage_restore", "restore from storage", FROM_STORAGE),
    _received("received_storage", "between processes, from storage", FROM_STORAGE),
    Measure("ramdisk", "RAM on ramdisks after saves, all hosts", "MiB",
            lambda r: sum(_tier(result, RAM)["ramdisk_bytes"] for result in r["save"])),
    Measure("rss_save", "largest process while saving to RAM, over its state", "x",
            lambda r: _peak_rss(r, RAM)),
    Measure("rss_storage", "largest process until saved to storage, over its state", "x",
            lambda r: _peak_rss(r, STORAGE)),
    Measure("rss_restore", "largest process while restoring, over its state", "x",
            _peak_rss_restoring),
)  # fmt: skip


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Return median, minimum and maximum over the rounds by measure, in seconds and bytes.

    All three are None when no round has a value. ``why`` is then the contender's own message if it
    refused to restore, else None.
    """
    return {measure.key: _summary(measure, rounds) for measure in MEASURES}


def _summary(measure: Measure, rounds: Sequence[Round]) -> dict[str, Any]:
    values: list[float] = []
    for round_ in rounds:
        with contextlib.suppress(NotMeasured):
            values.append(measure.of_round(round_))
    if values:
        return _spread(values) | {"rounds": values}
    refusals = (r["restores"].get(measure.scenario, {}).get("refused") for r in rounds)
    why = next(filter(None, refusals), None)
    return {"median": None, "min": None, "max": None, "rounds": [], "why": why}


def table(summaries: Mapping[str, Mapping[str, Any]], base: str) -> str:
    """Return Markdown: a row per measure with medians, their range, and ratios to ``base``.

    ``cannot`` marks a restore that the contender refused, with its reason below the table. A dash
    marks a tier that a contender lacks or a loss that a job lacks. Rows without any value are left
    out.
    """
    compared = [name for name in summaries if name != base and base in summaries]
    header = ["median (least to most)", *summaries, *(f"{name} / {base}" for name in compared)]
    rows, refusals = [], []
    for measure in MEASURES:
        found = {name: summary[measure.key] for name, summary in summaries.items()}
        whys = {name: summary.get("why") for name, summary in found.items()}
        if all(s["median"] is None and not whys[name] for name, s in found.items()):
            continue
        refusals += [f"{name} cannot: {measure.title}: {why}" for name, why in whys.items() if why]
        rows.append(
            [
                f"{measure.title}, {measure.unit}",
                *(_cell(summary, _UNITS[measure.unit]) for summary in found.values()),
                *(_times(found[name]["median"], found[base]["median"]) for name in compared),
            ]
        )
    return "\n".join([markdown([header, *rows]), *([""] if refusals else []), *refusals])


def _cell(summary: Mapping[str, Any], per_unit: float) -> str:
    if summary["median"] is None:
        return "cannot" if summary["why"] else "-"
    return _range(summary, per_unit)


def limit_medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the GB/s of each limit, median over the rounds."""
    return {name: median(r[name] for r in rounds) for name in rounds[0]}


def limits_table(rounds: Sequence[Mapping[str, float]]) -> str:
    """Return Markdown: the GB/s of each limit, median with its range over the rounds."""
    rows = [[name, _range(_spread([r[name] for r in rounds]), 1.0)] for name in rounds[0]]
    return markdown([["limit of this machine", "GB/s"], *rows])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _range(spread: Mapping[str, float], per_unit: float) -> str:
    middle, least, most = (number(spread[k] / per_unit) for k in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least} to {most})"


def _times(value: float | None, base: float | None) -> str:
    return f"{number(value / base)}x" if base and value is not None else "-"
