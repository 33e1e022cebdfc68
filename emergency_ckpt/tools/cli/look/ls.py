"""``eckpt ls``: the runs and steps in each tier, and what each step lacks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from emergency_ckpt.core.wording import TIER_WORDS
from emergency_ckpt.tools.cli.look import tables
from emergency_ckpt.tools.cli.look.arguments import BAD, GOOD, add_places, places_of, print_json
from emergency_ckpt.tools.survey.listing import ListedProcess, ListedStep, Listing, listing_of
from emergency_ckpt.tools.survey.survey import take_survey

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``ls``."""
    parser = subparsers.add_parser(
        "ls",
        help="list runs and steps in each tier",
        description=(
            "Lists the steps on ramdisks and in a directory or bucket: their age, their size, the"
            " number of processes, and whether each is whole or what it lacks. A step in RAM is"
            " whole when every shard and every host state is on one of the ramdisks given."
        ),
    )
    add_places(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List; return 1 when something is damaged, absent or could not be read."""
    listing = listing_of(take_survey(places_of(args)))
    if args.json:
        print_json(listing)
    else:
        _print(listing)
    return BAD if listing.faults else GOOD


def _print(listing: Listing) -> None:
    if listing.steps:
        tables.print_table(
            ["STEP", "TIER", "AGE", "SIZE", "PROCESSES", "RUN", "INCARNATION", "STATE"],
            [_row(each) for each in listing.steps],
        )
    else:
        print("no steps")
    if listing.processes:
        print()
        tables.print_table(
            ["PROCESS", "SLICE", "HOST", "OWNER", "STEPS", "DIRECTORY"],
            [_process_row(each) for each in listing.processes],
        )
    directory = listing.directory
    if directory is not None:
        notes = {"saves not ended": directory.unfinished, "moved aside": directory.set_aside}
        for title, names in notes.items():
            if names:
                print(tables.one_line(f"\n{title} in {directory.directory}: {', '.join(names)}"))
    if listing.changing:
        print("\nthe job saved while its ramdisks were read: some steps may seem incomplete")
    tables.print_faults(listing.faults)


def _row(each: ListedStep) -> list[str]:
    state = each.state.replace("_", " ")
    reason = "; ".join(filter(None, [each.reason, each.doubt]))
    return [
        str(each.step),
        TIER_WORDS[each.tier],
        tables.age(each.age_s),
        tables.size(each.size_bytes),
        "-" if each.processes is None else str(each.processes),
        each.run_id or "-",
        each.incarnation or "-",
        f"{state}: {reason}" if reason else state,
    ]


def _process_row(each: ListedProcess) -> list[str]:
    of = "" if each.process_count is None else f" of {each.process_count}"
    pid = "-" if each.pid is None else str(each.pid)
    life = {True: "running", False: "ended", None: "elsewhere"}[each.is_running]
    return [
        "-" if each.process_index is None else f"{each.process_index}{of}",
        "-" if each.slice_index is None else str(each.slice_index),
        each.hostname or "-",
        f"{pid} {life}",
        ", ".join(map(str, each.steps)) or "-",
        each.path,
    ]
