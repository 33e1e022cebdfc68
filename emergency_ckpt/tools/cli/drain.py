"""``eckpt drain``: the newest whole step in RAM, written to storage when a job has died."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from emergency_ckpt.core.wording import seconds_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import seconds
from emergency_ckpt.tools.cli.look.arguments import add_places, places_of, print_json

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

_EXIT_CODES = (
    "exit status: 0 storage has the newest step of these ramdisks, written now or before;"
    " 1 something is missing or damaged, the job still runs, or storage refused;"
    " 2 the command line is wrong"
)


class DrainReport(msgspec.Struct, frozen=True):
    """The outcome, as JSON."""

    step: int | None
    is_saved: bool
    is_written: bool
    notes: tuple[str, ...]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``drain``."""
    parser = subparsers.add_parser(
        "drain",
        help="write the newest step in RAM to storage, when a job has died for good",
        description=(
            "Puts the newest whole step of all ramdisks given together, and writes it to --dir as"
            " an ordinary persistent step. Needs no model code and no accelerator. Does nothing"
            " when storage has that step or a newer one; refuses while the job runs."
        ),
    )
    add_places(parser)
    parser.add_argument(
        "--peers",
        default="",
        metavar="HOST:PORT,...",
        help="fetch what is missing from 'eckpt serve' on other hosts; needs the run's secret",
    )
    parser.add_argument(
        "--write-timeout",
        type=seconds,
        default=1800.0,
        metavar="SECONDS",
        help="maximum time of one stage of the write (%(default)s)",
    )
    parser.epilog = _EXIT_CODES
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain; return 0 when storage has the newest step of these ramdisks. Errors pass."""
    peers = [peer for peer in args.peers.split(",") if peer]
    if not (args.dir and (args.local_dir or peers)):
        raise ConfigError(["--dir and --local-dir are needed"], target="eckpt drain")
    places = places_of(args)
    # Imported here, so that `eckpt drain --help` does not import JAX and Orbax.
    from emergency_ckpt.tools.cli.progress import progress_of  # noqa: PLC0415
    from emergency_ckpt.tools.offline.draining.drain import drain  # noqa: PLC0415
    from emergency_ckpt.tools.offline.export import use_no_accelerator  # noqa: PLC0415

    use_no_accelerator()
    begin_s = time.monotonic()
    done = drain(places, progress_of, args.write_timeout, peers)
    if args.json:
        print_json(DrainReport(done.step, done.is_saved, done.is_written, done.notes))
    else:
        took = seconds_text(time.monotonic() - begin_s)
        if done.is_written:
            print(f"drained step {done.step} to {args.dir} in {took}")
        elif done.step is not None:
            print(f"nothing to drain: {args.dir} has step {done.step}")
    for note in () if args.json else done.notes:
        print(f"eckpt drain: {note}", file=sys.stderr)
    return 0 if done.is_saved else 1
