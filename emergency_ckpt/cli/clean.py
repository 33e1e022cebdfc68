"""``eckpt clean``: lists and removes leftover runs on this host's ramdisk."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from emergency_ckpt.cli.arguments import duration
from emergency_ckpt.errors import LocalTierError
from emergency_ckpt.tiers.ramdisk.other_runs import (
    GRACE_S,
    LeftRun,
    holder_of,
    left_runs,
    remove_run,
)

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``clean``."""
    parser = subparsers.add_parser(
        "clean",
        help="list and remove leftover runs on this host's ramdisk",
        description=(
            "Lists the runs that have directories on a ramdisk, with their size and age. With --yes"
            " it removes those last changed longer ago than --older-than. A run always stays while"
            " a live process owns or serves one of its directories."
        ),
    )
    parser.add_argument("--local-dir", type=Path, required=True, help="the ramdisk directory")
    parser.add_argument("--run-id", help="only this run")
    parser.add_argument(
        "--older-than",
        type=duration,
        default=GRACE_S,
        metavar="AGE",
        help="only runs unchanged for this time: 90s, 30m, 12h, 7d, 0 (default: 1d)",
    )
    parser.add_argument(
        "--yes", action="store_true", help="remove them; otherwise they are only listed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List runs, with ``--yes`` remove them; return 1 if the named run is absent or stays."""
    try:
        runs = left_runs(args.local_dir)
    except OSError as error:
        raise LocalTierError("list", str(args.local_dir), error.strerror or str(error)) from error
    if args.run_id is not None:
        runs = [left for left in runs if left.run_id == args.run_id]
        if not runs:
            print(f"no run {args.run_id!r} in {args.local_dir}")
            return 1
    now_s = time.time()
    outcomes = [_outcome(left, now_s, args.older_than, remove=args.yes) for left in runs]
    for left, (text, _) in zip(runs, outcomes, strict=True):
        age_s, mib = max(left.age_s(now_s), 0), left.size_bytes / (1 << 20)
        print(f"{left.run_id}  {mib:.1f} MiB  {_age(age_s)} old  {text}")
    stays = args.run_id is not None and args.yes and not outcomes[0][1]
    return 1 if stays else 0


def _outcome(left: LeftRun, now_s: float, older_than_s: float, *, remove: bool) -> tuple[str, bool]:
    """Return the outcome for a run in words, and True when it was removed."""
    if (holder := holder_of(left)) is not None:
        return f"stays: in use by {holder.describe()}", False
    if left.age_s(now_s) < older_than_s:
        return "stays: not old enough (--older-than)", False
    if not remove:
        return "would be removed (--yes)", False
    if remove_run(left):
        return "removed", True
    return "stays: a process has it, or there is something else in it", False


def _age(age_s: float) -> str:
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if age_s >= size_s:
            return f"{age_s / size_s:.1f}{unit}"
    return f"{age_s:.0f}s"
