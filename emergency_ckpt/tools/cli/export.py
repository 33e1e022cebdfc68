"""``eckpt export``: a step in RAM or in storage as a directory of plain Orbax."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from emergency_ckpt.tools.cli.look.arguments import BAD, EXIT_CODES, GOOD, add_places, places_of

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``export``."""
    parser = subparsers.add_parser(
        "export",
        help="write a step as a directory of plain Orbax",
        description=(
            "Writes the step DIR/STEP, which plain Orbax restores, and the host states as JSON to"
            " DIR/host_states. STEP is a number or 'newest', perhaps after 'ram:' or 'storage:'. A"
            " step in RAM is put together from all ramdisks given, and its CRC32Cs are compared;"
            " its tree has the structure of the newest step in --dir with these leaves, else nested"
            " dicts. A step in storage is copied. DIR must not exist: it appears when it is whole."
        ),
    )
    parser.add_argument("step", metavar="STEP")
    parser.add_argument("directory", metavar="DIR", type=Path)
    add_places(parser)
    parser.epilog = EXIT_CODES
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export; return 1 when the step cannot be found or read. Errors pass to the caller."""
    places = places_of(args)
    # Imported here, so that `eckpt export --help` does not import JAX and Orbax.
    from emergency_ckpt.tools.cli.progress import progress_of  # noqa: PLC0415
    from emergency_ckpt.tools.offline.export import (  # noqa: PLC0415
        export_step,
        use_no_accelerator,
    )

    use_no_accelerator()
    done = export_step(args.step, args.directory, places, progress_of)
    print(f"exported {done.name} to {args.directory}: {done.leaves} leaves")
    for note in done.notes:
        print(f"eckpt export: {note}", file=sys.stderr)
    return GOOD if done.is_whole else BAD
