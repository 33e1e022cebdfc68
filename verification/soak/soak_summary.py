"""The figures of a soak, from its incidents. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RIGHT = ("recovered", "nothing left", "begun anew")


def wilson(good: int, of: int) -> tuple[float, float]:
    """Return Wilson's interval of a proportion at 95%; (0, 1) of nothing."""
    from scipy.stats import binomtest  # noqa: PLC0415 - not in each life of the soak

    if of == 0:
        return 0.0, 1.0
    low, high = binomtest(good, of).proportion_ci(method="wilson")
    return low, high


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures: counts, Wilson's interval, losses, times, and the seed of each failure.

    ``recovered`` is of the incidents after which something was left to recover.
    """
    lines = list(lines)
    results = Counter(line["result"] for line in lines)
    could = [line for line in lines if line["result"] not in ("nothing left", "begun anew")]
    good = [line for line in could if line["result"] == "recovered"]
    low, high = wilson(len(good), len(could))
    seconds = [line["seconds"] for line in good]
    lost = [line["lost"] for line in good if line["lost"] is not None]
    kinds = sorted({kind for line in lines for kind in line["kinds"]})
    return {
        "incidents": len(lines),
        "nothing_left": results["nothing left"],
        "begun_anew": results["begun anew"],
        "recovered": len(good),
        "recovered_share": round(len(good) / len(could), 5) if could else None,
        "interval_95": [round(low, 5), round(high, 5)],
        "results": dict(sorted(results.items())),
        "wrong_bytes": sum(results[each] for each in ("wrong bytes", "wrong iterator")),
        "hangs": results["hang"],
        "steps_lost": {str(n): count for n, count in sorted(Counter(lost).items())},
        "seconds": {
            "median": round(statistics.median(seconds), 3) if seconds else None,
            "p95": round(quantile(seconds, 0.95), 3) if seconds else None,
            "most": round(max(seconds), 3) if seconds else None,
        },
        "kinds": {kind: _of_kind([x for x in lines if kind in x["kinds"]]) for kind in kinds},
        "failures": [
            {"seed": line["seed"], "incident": line["incident"], "problems": line["problems"]}
            for line in lines
            if line["result"] not in RIGHT
        ],
    }


def _of_kind(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of the incidents with one kind of fault, perhaps among others."""
    good = [line for line in lines if line["result"] == "recovered"]
    lost = [line["lost"] for line in good if line["lost"] is not None]
    seconds = [line["seconds"] for line in good]
    return {
        "incidents": len(lines),
        "tried": sum(line["result"] not in ("nothing left", "begun anew") for line in lines),
        "recovered": len(good),
        "lost": [quantile(lost, 0.5), max(lost)] if lost else None,
        "seconds": [quantile(seconds, 0.5), max(seconds)] if seconds else None,
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return Markdown with a row for each kind of fault, from a ``summary``."""
    head = ("fault", "incidents", "recovered", "steps lost: median, most", "s: median, most")
    rows = [head, ("---",) * len(head)]
    for kind, found in figures["kinds"].items():
        pairs = ["-" if found[key] is None else "{}, {}".format(*found[key]) for key in _PAIRS]
        of = f"{found['recovered']} of {found['tried']}"
        rows.append((kind.replace("_", " "), str(found["incidents"]), of, *pairs))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


_PAIRS = ("lost", "seconds")
