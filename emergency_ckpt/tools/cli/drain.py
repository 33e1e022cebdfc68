"""``eckpt drain``: the newest whole step in RAM, for storage, when a job has died for good."""

from __future__ import annotations

import argparse
import sys
import time

from emergency_ckpt.core.wording import seconds_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import (
    add_peers,
    add_places,
    places_of,
    print_json,
    seconds,
)
from emergency_ckpt.tools.cli.output import ProgressLines, tell

EXAMPLE = "eckpt drain --local-dir /dev/shm/eckpt --dir gs://bucket/run7 --run-id run7"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``drain``."""
    parser.description = (
        "Writes the newest whole step of all ramdisks given to --dir, as an ordinary persistent"
        " step. Does nothing when storage has that step or a newer one; refuses while the job runs."
    )
    parser.epilog = (
        "exit status: 0 storage has the newest step of these ramdisks, written now or before;"
        " 1 something is missing or damaged, the job still runs, or storage refused;"
        " 2 the command line is wrong"
    )
    add_places(parser)
    add_peers(
        parser, "fetch what is missing from 'eckpt serve' on other hosts; needs the run's secret"
    )
    parser.add_argument(
        "--write-timeout",
        type=seconds,
        default=1800.0,
        metavar="SECONDS",
        help="give up a write in which nothing has moved for so long",
    )


def run(args: argparse.Namespace) -> int:
    """Drain; return 0 when storage has the newest step of these ramdisks. Errors pass."""
    if not (args.dir and (args.local_dir or args.peers)):
        raise ConfigError(["--dir and --local-dir are needed"], target="eckpt drain")
    places = places_of(args)
    # Imported here, so that `eckpt drain --help` does not import JAX and Orbax.
    import jax  # noqa: PLC0415

    from emergency_ckpt.tools.draining.drain import drain  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")  # a drain takes no accelerator
    begin_s = time.monotonic()
    done = drain(places, ProgressLines, args.write_timeout, args.peers)
    if args.json:
        print_json(done)
    else:
        took = seconds_text(time.monotonic() - begin_s)
        if done.is_written:
            tell(f"drained step {done.step} to {args.dir} in {took}", sys.stdout)
        elif done.step is not None:
            tell(f"nothing to drain: {args.dir} has step {done.step}", sys.stdout)
    for note in () if args.json else done.notes:
        tell(f"eckpt drain: {note}", sys.stderr)
    return 0 if done.is_saved else 1
