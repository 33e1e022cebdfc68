"""What the programs of all benchmarks share: their options, turns, and the results they write."""

import argparse
import datetime
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import machine

T = TypeVar("T")


def new_parser(
    name: str, doc: str | None, job_timeout_s: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser with ``--out``, described by the first line of ``doc``.

    With ``job_timeout_s`` also ``--ramdisk`` and ``--timeout-s``, which jobs need.
    """
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=(doc or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="for the results")
    if job_timeout_s is not None:
        parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a tmpfs")
        parser.add_argument(
            "--timeout-s", type=above_0, default=job_timeout_s, help="for each life of a job"
        )
    return parser


def parse_with_quick(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, str]
) -> argparse.Namespace:
    """Return the options; with ``--quick`` other defaults apply, and flags still win over them."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in quick.items())
    parser.add_argument("--quick", action="store_true", help=flags)
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(arguments)
    return options


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def above_0(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite")
    return value


def words(text: str) -> list[str]:
    """Return the values without duplicates, in the order given."""
    return list(dict.fromkeys(text.split(",")))


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argument type that accepts only these words."""

    def parse(text: str) -> list[str]:
        if unknown := [word for word in words(text) if word not in names]:
            raise argparse.ArgumentTypeError(f"{unknown} not in {list(names)}")
        return words(text)

    return parse


def in_turn(contenders: Sequence[T], round_number: int) -> list[T]:
    """Return the order of a round: nobody is always first, nor always after the same other."""
    turn = round_number % len(contenders)
    return [*contenders[turn:], *contenders[:turn]]


def publish(
    options: argparse.Namespace,
    name: str,
    about: Mapping[str, Any],
    text: str,
    document: Mapping[str, Any],
) -> None:
    """Print ``text``, and write NAME.json into ``--out``: ``document``, machine and date.

    ``about``: the facts of the machine before the measurement.
    """
    print(text)
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        print(f"\nNot an idle machine (load average {load:.1f} at start): do not publish.")
    head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": about}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(head | document, indent=1) + "\n")
    print(f"\nWritten to {path}")
