"""Restores after a lost slice with each ``transfer_security``, in turn on one job."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.contenders.modes import MODES, VARIABLE
from benchmarks.common.job import SLICE_LOST, Shape
from benchmarks.common.lives import Place, RoundFailed, run_round
from benchmarks.common.tables import markdown, number
from benchmarks.compare import report

CONTENDER = "ours"
_BASE = MODES[0]


@dataclasses.dataclass
class ModeRounds:
    """Rounds of the modes, and the time of the slowest one.

    Attributes:
      rounds: the results of ``lives.run_round`` by mode.
      failures: their descriptions.
      longest_s: time of the slowest turn of all modes.
    """

    rounds: dict[str, list[dict[str, Any]]] = dataclasses.field(
        default_factory=lambda: {mode: [] for mode in MODES}
    )
    failures: list[str] = dataclasses.field(default_factory=list[str])
    longest_s: float = 0.0

    def take_turns(self, number: int, shape: Shape, place: Place) -> None:
        """Save once and restore once with each mode; the first one rotates with ``number``."""
        began_s = time.monotonic()
        # Only the restore is looked at: one save is enough.
        shape = dataclasses.replace(shape, timed_saves=1)
        turn = number % len(MODES)
        for mode in MODES[turn:] + MODES[:turn]:
            print(f"round {number + 1}: {shape.name}, {mode}", file=sys.stderr)
            here = dataclasses.replace(place, environment={**place.environment, VARIABLE: mode})
            try:
                self.rounds[mode].append(run_round(CONTENDER, shape, here, (SLICE_LOST,)))
            except RoundFailed as failure:
                print(f"compare: {failure}", file=sys.stderr)
                self.failures.append(f"round {number + 1}, {shape.name}, {mode}: {failure}")
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def document(self) -> dict[str, Any]:
        """Return the seconds of the restores by mode, for the JSON."""
        return {
            mode: {"restore_lost_slice_s": seconds} for mode, seconds in self._seconds().items()
        }

    def table(self) -> str:
        """Return Markdown: the seconds of each mode, also as a multiple of the first mode's."""
        seconds = self._seconds()
        medians = {mode: report.median(each) for mode, each in seconds.items() if each}
        base = medians.get(_BASE)
        rows = [["transfer_security", "restore, one slice's ramdisks lost, s", f"to {_BASE}"]]
        for mode, median in medians.items():
            ratio = "-" if not base else f"{number(median / base)}x"
            rows.append([mode, report.spread_text(seconds[mode]), ratio])
        return markdown(rows)

    def _seconds(self) -> Mapping[str, list[float]]:
        return {
            mode: [report.restore_s(round_, SLICE_LOST) for round_ in rounds]
            for mode, rounds in self.rounds.items()
        }


def are_wanted(options: argparse.Namespace, shapes: Sequence[Shape]) -> bool:
    """Return whether the run includes restores of our checkpointer after a lost slice."""
    return bool(shapes) and CONTENDER in options.contenders and SLICE_LOST in options.restores
