"""From raw times of every process to medians, ratios and a table. Pure."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Round = Mapping[str, Any]
"""What ``lives.run_round`` returns."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the table: less is better in all of them."""

    key: str
    title: str
    unit: str
    per_unit: float
    """How many of the measured quantity (seconds, bytes) make one unit."""
    of_round: Callable[[Round], float]


def _spans_s(round_: Round, pick: Callable[[Any], Any], start: str, end: str) -> list[float]:
    """Duration of each event of a round, from its first start to its last end over processes.

    All processes read the same monotonic clock of the same machine.
    """
    by_process = [pick(result) for result in round_["save"]]
    events = zip(*by_process, strict=True)
    return [max(e[end] for e in event) - min(e[start] for e in event) for event in events]


def stalls_s(round_: Round) -> list[float]:
    """For each timed save, how long the slowest process's training thread was inside ``save``."""
    by_process = [result["saves"] for result in round_["save"]]
    return [
        max(e["returned_s"] - e["start_s"] for e in event)
        for event in zip(*by_process, strict=True)
    ]


def published_s(round_: Round) -> list[float]:
    """For each timed save, from the first call until no process waits for it any more."""
    return _spans_s(round_, lambda result: result["saves"], "start_s", "published_s")


def restore_s(round_: Round, end: str = "restored_s") -> float:
    """From building the checkpointer in the first process to values on the last one's devices."""
    results = round_["restore"]
    return max(r[end] for r in results) - min(r["start_s"] for r in results)


def _one_save(key: str) -> Callable[[Round], float]:
    return lambda r: _spans_s(r, lambda result: [result[key]], "start_s", "published_s")[0]


def _largest(life: str) -> Callable[[Round], float]:
    return lambda r: max(result["peak_rss_bytes"] for result in r[life])


_MIB = float(2**20)

MEASURES = (
    Measure("stall", "stall of the training thread, median", "ms", 1e-3,
            lambda r: statistics.median(stalls_s(r))),
    Measure("stall_worst", "stall of the training thread, worst", "ms", 1e-3,
            lambda r: max(stalls_s(r))),
    Measure("published", "until published in RAM", "s", 1.0,
            lambda r: statistics.median(published_s(r))),
    Measure("published_first", "until published, first save", "s", 1.0, _one_save("warm_up")),
    Measure("published_training", "save, a donating step, wait: in all", "s", 1.0,
            _one_save("donated")),
    Measure("restore_lost_slice", "restore, one slice's ramdisks lost", "s", 1.0, restore_s),
    Measure("restore_and_read", "the same, until all values were read once", "s", 1.0,
            lambda r: restore_s(r, "read_s")),
    Measure("ramdisk", "RAM on ramdisks after saves, all hosts", "MiB", _MIB,
            lambda r: sum(r["ramdisk_bytes"])),
    Measure("ramdisk_peak", "RAM on ramdisks during a save, all hosts", "MiB", _MIB,
            lambda r: sum(result["peak_ramdisk_bytes"] for result in r["save"])),
    Measure("rss_save", "largest process while saving (peak RSS)", "MiB", _MIB, _largest("save")),
    Measure("rss_restore", "largest process while restoring (peak RSS)", "MiB", _MIB,
            _largest("restore")),
)  # fmt: skip


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Median, least and most over the rounds, in seconds and bytes, by measure."""
    summary = {}
    for measure in MEASURES:
        values = [measure.of_round(r) for r in rounds]
        summary[measure.key] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "rounds": values,
        }
    return summary


def ratios(
    summaries: Mapping[str, Mapping[str, Any]], base: str
) -> dict[str, dict[str, float | None]]:
    """How many times ``base``'s median every other contender's is; None where that is 0."""
    return {
        name: {
            key: value["median"] / summaries[base][key]["median"]
            if summaries[base][key]["median"]
            else None
            for key, value in summary.items()
        }
        for name, summary in summaries.items()
        if name != base and base in summaries
    }


def table(summaries: Mapping[str, Mapping[str, Any]], base: str) -> str:
    """Markdown: a row for each measure, medians with their range, and the ratios to ``base``."""
    compared = ratios(summaries, base)
    header = ["median (least to most)", *summaries, *(f"{name} / {base}" for name in compared)]
    rows = [
        [
            f"{measure.title}, {measure.unit}",
            *(_range(summary[measure.key], measure.per_unit) for summary in summaries.values()),
            *(_times(ratio[measure.key]) for ratio in compared.values()),
        ]
        for measure in MEASURES
    ]
    return markdown([header, *rows])


def limits_table(rounds: Sequence[Mapping[str, float]]) -> str:
    """Markdown: GB/s of each limit, median with its range over the rounds."""
    rows = [[name, _range(_spread([r[name] for r in rounds]), 1.0)] for name in rounds[0]]
    return markdown([["limit of this machine", "GB/s"], *rows])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _range(spread: Mapping[str, float], per_unit: float) -> str:
    median, least, most = (number(spread[k] / per_unit) for k in ("median", "min", "max"))
    return median if least == most else f"{median} ({least} to {most})"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 1e-3 or value == 0 else f"{value:.4f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{number(ratio)}x"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table with a header row; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
