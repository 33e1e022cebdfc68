"""``eckpt export``: a step as a directory of plain Orbax, or the newest in RAM to storage."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from emergency_ckpt.core.wording import seconds_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import (
    BAD,
    EXIT_CODES,
    GOOD,
    add_peers,
    add_places,
    places_of,
    print_json,
    seconds,
)
from emergency_ckpt.tools.cli.output import tell

_DRAIN_EXIT_CODES = (
    "with --drain: 0 storage has the newest step of these ramdisks, written now or before;"
    " 1 something is missing or damaged, the job still runs, or storage refused"
)


EXAMPLE = "eckpt export ram:newest exported --local-dir /dev/shm/eckpt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    parser.description = (
        "Writes the step DIR/STEP, which plain Orbax restores, and the host states as JSON to"
        " DIR/host_states. STEP is a number or 'newest', perhaps after 'ram:' or 'storage:'. A"
        " step in RAM is put together from all ramdisks given, and its CRC32Cs are compared;"
        " its tree has the structure of the newest step in --dir with these leaves, else nested"
        " dicts. A step in storage is copied. DIR must not exist: it appears when it is whole."
    )
    parser.epilog = f"{EXIT_CODES}; {_DRAIN_EXIT_CODES}"
    parser.add_argument("step", metavar="STEP", nargs="?", help="the step to write")
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="a new directory")
    add_places(parser)
    group = parser.add_argument_group("drain a job that has died for good")
    group.add_argument(
        "--drain",
        action="store_true",
        help="instead of STEP and DIR: write the newest whole step of all ramdisks given to --dir,"
        " as an ordinary persistent step. Does nothing when storage has that step or a newer one;"
        " refuses while the job runs",
    )
    add_peers(
        group, "fetch what is missing from 'eckpt serve' on other hosts; needs the run's secret"
    )
    group.add_argument(
        "--write-timeout",
        type=seconds,
        default=1800.0,
        metavar="SECONDS",
        help="maximum time of one stage of the write",
    )


def run(args: argparse.Namespace) -> int:
    """Export or drain; return 1 when a step cannot be found, read or written. Errors pass."""
    named = args.step is not None
    problem = ""
    if args.drain:
        problem = "--drain takes no STEP and no DIR" if named else ""
    elif args.directory is None:
        problem = "give STEP and DIR, or --drain"
    elif args.peers:
        problem = "--peers needs --drain"
    elif args.json:
        problem = "--json needs --drain"
    if problem:
        raise ConfigError([problem], target="eckpt export")
    # Imported here, so that `eckpt export --help` does not import JAX and Orbax.
    from emergency_ckpt.tools.offline.export_step import use_no_accelerator  # noqa: PLC0415

    use_no_accelerator()
    return _drain(args) if args.drain else _export(args)


def _export(args: argparse.Namespace) -> int:
    from emergency_ckpt.tools.cli.progress import progress_of  # noqa: PLC0415
    from emergency_ckpt.tools.offline.export_step import export_step  # noqa: PLC0415

    done = export_step(args.step, args.directory, places_of(args), progress_of)
    tell(f"exported {done.name} to {args.directory}: {done.leaves} leaves", sys.stdout)
    for note in done.notes:
        tell(f"eckpt export: {note}", sys.stderr)
    return GOOD if done.is_complete else BAD


def _drain(args: argparse.Namespace) -> int:
    """Drain; return 0 when storage has the newest step of these ramdisks. Errors pass."""
    if not (args.dir and (args.local_dir or args.peers)):
        raise ConfigError(["--dir and --local-dir are needed"], target="eckpt export --drain")
    places = places_of(args)
    from emergency_ckpt.tools.cli.progress import progress_of  # noqa: PLC0415
    from emergency_ckpt.tools.offline.draining.drain import drain  # noqa: PLC0415

    begin_s = time.monotonic()
    done = drain(places, progress_of, args.write_timeout, args.peers)
    if args.json:
        print_json(done)
    else:
        took = seconds_text(time.monotonic() - begin_s)
        if done.is_written:
            tell(f"drained step {done.step} to {args.dir} in {took}", sys.stdout)
        elif done.step is not None:
            tell(f"nothing to drain: {args.dir} has step {done.step}", sys.stdout)
    for note in () if args.json else done.notes:
        tell(f"eckpt export --drain: {note}", sys.stderr)
    return 0 if done.is_saved else 1
