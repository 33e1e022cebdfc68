"""Arguments, exit codes and ``--json`` of the commands that look."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from emergency_ckpt import run_secret
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import seconds, user_id
from emergency_ckpt.tools.survey.places import Places

GOOD, BAD = 0, 1
EXIT_CODES = (
    "exit status: 0 all is well; 1 something is damaged, absent, or could not be read;"
    " 2 the command line is wrong"
)
"""Of all commands that look; docs/operations.md has the same words."""


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name what to look at."""
    parser.epilog = EXIT_CODES
    parser.add_argument(
        "--local-dir",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a ramdisk (local_dir of the job), of a live job or a dead host; may be repeated",
    )
    parser.add_argument(
        "--dir", default="", metavar="DIR", help="the persistent tier: a path, or a URL as gs://"
    )
    parser.add_argument("--run-id", help="only this run (default: all)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the run's secret: signatures are compared, and what is not signed with it"
        f" is named; default: ${run_secret.SECRET_VARIABLE}, if set",
    )
    parser.add_argument(
        "--owner",
        type=user_id,
        metavar="USER",
        help="owner of the ramdisks, by name or number, when root looks; default: the user of this"
        " command",
    )
    add_timeout(parser)
    add_json(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add ``--timeout``."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="maximum time of one call to storage (%(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on the standard output"
    )


def places_of(args: argparse.Namespace, *, may_be_none: bool = False) -> Places:
    """Return the places of a command line. ConfigError for a bad secret, or without any place."""
    if not (may_be_none or args.local_dir or args.dir):
        raise ConfigError(["name --local-dir, --dir or both"], target=f"eckpt {args.command}")
    return Places(
        local_dirs=tuple(dict.fromkeys(args.local_dir)),
        directory=args.dir,
        run_id=args.run_id,
        secret=run_secret.secret_for_tools(args.secret_file),
        owner_uid=args.owner,
        timeout_s=args.timeout,
    )


def print_json(document: msgspec.Struct) -> None:
    """Print a document as one line of JSON, which tools read."""
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
