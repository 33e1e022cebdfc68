"""Give this checkpointer and Orbax's emergency manager the same faults, and count what comes back.

    python -m benchmarks.faults --rounds 10 --out faults_out

A job of three slices saves to its ramdisks at each step and to storage at each fourth. It is
killed at a random moment, loses or has damaged what the kind of fault says, and starts again. All
choices come from the seed. benchmarks/README.md explains the figures.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import machine, tables, warm
from benchmarks.common.arguments import above_0, positive, some_of
from benchmarks.common.lives import IMPORTED_BY_ALL
from benchmarks.faults import incident
from benchmarks.faults.incident import FAULTS, NEWEST, OUTCOMES, Outcome, Place

CONTENDERS = ("ours", "orbax-emergency")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[Outcome] = []
    with warm.started(IMPORTED_BY_ALL, (ROOT,)) as address:
        place = Place(options.ramdisk, options.out, options.timeout_s, address)
        for number in range(options.rounds):
            for fault in options.faults:
                for contender in CONTENDERS:
                    # Both meet the same choices.
                    choices = random.Random(f"{options.seed}/{number}/{fault}")
                    one = incident.run(contender, fault, choices, place)
                    found.append(one)
                    print(f"{number}: {contender}, {fault}: {one.text}", file=sys.stderr)
                    with (options.out / "outcomes.jsonl").open("a") as lines:
                        lines.write(json.dumps({"round": number} | one._asdict()) + "\n")
    (options.out / "table.md").write_text(table(found) + "\n")
    print(json.dumps(machine.facts(), indent=1), table(found), sep="\n")
    return 0


def table(found: Sequence[Outcome]) -> str:
    """Return the outcomes by kind of fault, ours and the other's beside each other."""
    rows = [["fault", *(f"{contender}" for contender in CONTENDERS)]]
    kinds = list(dict.fromkeys(outcome.fault for outcome in found))
    for fault in [*kinds, "all"]:
        cells = [
            _cell([o for o in found if o.contender == contender and fault in (o.fault, "all")])
            for contender in CONTENDERS
        ]
        rows.append([fault, *cells])
    return tables.markdown(rows)


def _cell(found: Sequence[Outcome]) -> str:
    counts = Counter(outcome.what for outcome in found)
    words = [f"{counts[NEWEST]} of {len(found)}"]
    words += [f"{counts[what]} {what}" for what in OUTCOMES if what != NEWEST and counts[what]]
    return ", ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="incidents of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=some_of(FAULTS), default=list(FAULTS))
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout-s", type=above_0, default=120.0, help="for each life")
    parser.add_argument("--out", type=Path, default=Path("faults_out"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
