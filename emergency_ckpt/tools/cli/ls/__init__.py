"""``eckpt ls``: the runs and steps in each tier, what each step lacks, and one step in full.

The command only reads, and needs no backend of JAX, while the job runs and after the job has died.
``check``, ``explain``, ``step`` and ``survives`` are the other views. docs/inspection.md documents
what ``--json`` prints.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import msgspec

from emergency_ckpt.core.wording import TIER_WORDS, count_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import (
    BAD,
    EXIT_CODES,
    GOOD,
    add_peers,
    add_places,
    places_of,
    print_json,
    step_number,
)
from emergency_ckpt.tools.cli.output import (
    age_text,
    known_size_text,
    print_faults,
    print_line,
    print_table,
)
from emergency_ckpt.tools.survey.places import SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder
from emergency_ckpt.tools.survey.survey import Survey, take_survey
from emergency_ckpt.types import LOCAL, PERSISTENT

FORMAT = 2
"""Raised when a field is removed or gets another meaning; fields may be added."""

EXAMPLE = "eckpt ls --local-dir /dev/shm/eckpt --dir gs://bucket/run7"


class ListedProcess(msgspec.Struct, frozen=True):
    """One process directory of a ramdisk.

    Attributes:
      process_index, process_count, slice_index, hostname: of the process that saved there last;
        null before its first save.
      pid: of the process that had the directory last.
      is_running: whether it lives; null when it is of another host, or unknown.
      known_complete: the newest step that it knew to be whole everywhere.
    """

    path: str
    run_id: str
    process_index: int | None
    process_count: int | None
    slice_index: int | None
    hostname: str
    pid: int | None
    is_running: bool | None
    known_complete: int | None
    steps: tuple[int, ...]


class ListedDirectory(msgspec.Struct, frozen=True):
    """The persistent directory. ``run_id``: the run on record that saves there."""

    directory: str
    run_id: str
    unfinished: tuple[str, ...]
    hidden: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True):
    """All of it. ``changing``: a job saved faster than its ramdisks could be read."""

    format: int
    time_s: float
    steps: tuple[SurveyedStep, ...]
    processes: tuple[ListedProcess, ...]
    directory: ListedDirectory | None
    faults: tuple[SurveyFault, ...]
    changing: bool


def _listing_of(survey: Survey) -> Listing:
    directory = None
    if survey.directory is not None:
        stored = survey.directory
        directory = ListedDirectory(
            stored.directory, stored.run_id, stored.unfinished, stored.hidden
        )
    return Listing(
        format=FORMAT,
        time_s=survey.time_s,
        steps=survey.steps,
        processes=tuple(_process(folder) for folder in survey.folders),
        directory=directory,
        faults=survey.faults,
        changing=survey.changing,
    )


def _process(folder: ProcessFolder) -> ListedProcess:
    newest = max(folder.copies, key=lambda copy: copy.saved_s, default=None)
    writer = newest.published.writer if newest else None
    known, owner = folder.ledger.complete, folder.owner
    return ListedProcess(
        path=str(folder.path),
        run_id=folder.run_id,
        process_index=writer.process_index if writer else None,
        process_count=writer.process_count if writer else None,
        slice_index=writer.slice_index if writer else None,
        hostname=writer.hostname if writer else owner.hostname if owner else "",
        pid=owner.pid if owner else None,
        is_running=owner.is_running if owner else None,
        known_complete=known.step if known else None,
        steps=tuple(sorted({copy.published.save.step for copy in folder.copies})),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ls``."""
    parser.description = (
        "Lists the steps on ramdisks and in a directory or bucket: their age, their size, the"
        " number of processes, and whether each is whole or what it lacks. A step in RAM is"
        " whole when every shard and every host state is on one of the ramdisks given."
    )
    parser.epilog = (
        f"{EXIT_CODES}. With --survives, 1 also says that the loss of one host or slice would cost"
        " the newest step; with --explain, that the restore failed or did not end"
    )
    add_places(parser)
    step = parser.add_argument_group(
        "one step",
        "Every leaf with its shape and dtype, the boxes in which it was saved, their CRC32C and"
        " holders, and the host state of each process, abbreviated. Of several saves with the"
        " number a whole one is shown, from RAM if it is there.",
    )
    step.add_argument("step", type=step_number, nargs="?", metavar="STEP", help="its number")
    step.add_argument(
        "--tier", choices=(LOCAL, PERSISTENT), default="", help="only this (default: both)"
    )
    step.add_argument(
        "--incarnation", default="", help="the save of this incarnation, of several of one step"
    )
    check = parser.add_argument_group("damage")
    check.add_argument(
        "--check",
        action="store_true",
        help="verify the small files of every step: manifests, host states, markers and checksums."
        " Parts that are on other hosts are no damage",
    )
    check.add_argument(
        "--read-data",
        action="store_true",
        help="with --check: read every shard in RAM and every box in storage, and compare their"
        " CRC32Cs with those of capture",
    )
    survives = parser.add_argument_group("losses")
    survives.add_argument(
        "--survives",
        action="store_true",
        help="count the copies of the newest whole step in RAM, and show which hosts or slices"
        " would cost it. A host is one --local-dir, or one peer's address",
    )
    add_peers(
        survives, "ask these live processes or 'eckpt serve' too; needs the secret and --run-id"
    )
    explain = parser.add_argument_group("the last restore")
    explain.add_argument(
        "--explain",
        type=Path,
        metavar="DIR",
        help="tell from this event_log of a job which step the last restore took and why, the bytes"
        " that each process got, and the time of each phase; under 'eckpt launch' the folder"
        " 'events' of its --log-dir",
    )


def run(args: argparse.Namespace) -> int:
    """List, or what an option asks; return 1 when something is damaged, absent or unreadable."""
    view = _view_of(args)
    if view:
        return int(importlib.import_module(f"{__package__}.{view}").run(args))
    survey = take_survey(places_of(args))
    if args.json:
        print_json(_listing_of(survey))
    else:
        _print(_listing_of(survey))
    return BAD if survey.faults else GOOD


def _view_of(args: argparse.Namespace) -> str:
    """Return what is asked: "step", a module of this package, or "" for the list.

    ConfigError where options clash.
    """
    asked = {
        "step": args.step is not None,
        "check": args.check,
        "survives": args.survives,
        "explain": args.explain is not None,
    }
    views = [view for view, is_asked in asked.items() if is_asked]
    view = views[0] if views else ""
    needs = {
        "STEP, --check, --survives and --explain exclude each other": len(views) > 1,
        "--tier and --incarnation need STEP": (args.tier or args.incarnation) and view != "step",
        "--read-data needs --check": args.read_data and view != "check",
        "--peers needs --survives": args.peers and view != "survives",
        "--secret-file needs --peers": args.secret_file is not None and not args.peers,
        "--explain takes no --local-dir, no --dir and no --run-id": (
            args.local_dir or args.dir or args.run_id
        )
        and view == "explain",
    }
    problems = [text for text, is_wrong in needs.items() if is_wrong]
    if problems:
        raise ConfigError(problems, target="eckpt ls")
    return view


def _print(listing: Listing) -> None:
    if listing.steps:
        print_table(
            ["STEP", "TIER", "AGE", "SIZE", "PROCESSES", "RUN", "INCARNATION", "STATE"],
            [_row(step) for step in listing.steps],
        )
    else:
        print("no steps")
    if listing.processes:
        print()
        print_table(
            ["PROCESS", "SLICE", "HOST", "OWNER", "STEPS", "DIRECTORY"],
            [_process_row(process) for process in listing.processes],
        )
    directory = listing.directory
    if directory is not None:
        notes = {"saves not ended": directory.unfinished, "hidden": directory.hidden}
        for title, names in notes.items():
            if names:
                print()
                print_line(f"{title} in {directory.directory}: {', '.join(names)}")
    if listing.changing:
        print("\nthe job saved while its ramdisks were read: some steps may seem incomplete")
    print_faults(listing.faults)


def _row(step: SurveyedStep) -> list[str]:
    state = step.state.replace("_", " ")
    began = count_text(step.lives, "life", "lives") + " in a row began from it"
    reason = "; ".join(filter(None, [step.reason, began if step.lives else ""]))
    return [
        str(step.step),
        TIER_WORDS[step.tier],
        age_text(step.age_s),
        known_size_text(step.size_bytes),
        "-" if step.processes is None else str(step.processes),
        step.run_id or "-",
        step.incarnation or "-",
        f"{state}: {reason}" if reason else state,
    ]


def _process_row(process: ListedProcess) -> list[str]:
    of = "" if process.process_count is None else f" of {process.process_count}"
    pid = "-" if process.pid is None else str(process.pid)
    life = {True: "running", False: "ended", None: "elsewhere"}[process.is_running]
    return [
        "-" if process.process_index is None else f"{process.process_index}{of}",
        "-" if process.slice_index is None else str(process.slice_index),
        process.hostname or "-",
        f"{pid} {life}",
        ", ".join(map(str, process.steps)) or "-",
        process.path,
    ]
