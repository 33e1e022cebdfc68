"""``eckpt diff``: the leaves in which two steps differ, between steps, tiers and directories."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

import msgspec

from emergency_ckpt.tools.cli import tables
from emergency_ckpt.tools.cli.arguments import add_places, places_of, print_json
from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.cli.progress import progress_of

if TYPE_CHECKING:
    from emergency_ckpt.tools.offline.compare import LeafDifference


EQUAL, DIFFERENT, FAILED = 0, 1, 3
EXIT_CODES = (
    "exit status: 0 the steps are equal bit for bit; 1 they differ; 2 the command line is wrong;"
    " 3 a step could not be found or read"
)
_STRUCTURE = {"only_in_a": "only in A: {0.a}", "only_in_b": "only in B: {0.b}"}


class Comparison(msgspec.Struct, frozen=True):
    """The result, as JSON. ``leaves``: of both steps together."""

    a: str
    b: str
    equal: bool
    leaves: int
    differences: tuple[LeafDifference, ...]


EXAMPLE = "eckpt diff ram:newest storage:newest --local-dir /dev/shm/eckpt --dir gs://bucket/run7"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    parser.description = (
        "Compares the arrays of two steps bit for bit, and names the leaves that differ: in"
        " structure, shape, dtype or values, with the largest absolute difference. A and B are"
        " STEP, ram:STEP or storage:STEP, with the number of a step or 'newest'; or a folder or"
        " URL of a step that Orbax wrote. A plain STEP is taken from RAM where it is whole"
        " there. CRC32Cs are compared on the way; memory is that of one box of each side."
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    add_places(parser)
    parser.set_defaults(peers=(), secret_file=None)
    parser.epilog = EXIT_CODES


def run(args: argparse.Namespace) -> int:
    """Compare and print; return 1 when the steps differ, 3 when one cannot be read."""
    # Imported here, so that `eckpt diff --help` does not import numpy.
    from emergency_ckpt.errors import CheckpointError, ConfigError  # noqa: PLC0415

    try:
        found = _compare(args)
    except ConfigError:
        raise
    except (CheckpointError, OSError) as error:
        tables.print_error(args.command, str(error))
        return FAILED
    if args.json:
        print_json(found)
    else:
        _print(found)
    return EQUAL if found.equal else DIFFERENT


def _compare(args: argparse.Namespace) -> Comparison:
    from emergency_ckpt.tier import leaf_bytes  # noqa: PLC0415  takes numpy
    from emergency_ckpt.tools.offline.compare import differences  # noqa: PLC0415  takes numpy
    from emergency_ckpt.tools.offline.named_steps import find_step  # noqa: PLC0415

    places = places_of(args, may_be_none=True)
    with contextlib.ExitStack() as stack:
        a, b = (find_step(name, places) for name in (args.a, args.b))
        for source in (a, b):
            stack.callback(source.close)
        total_bytes = sum(map(leaf_bytes, a.leaves.values()))
        progress = stack.enter_context(progress_of("compare", total_bytes))
        found = tuple(differences(a, b, progress))
        return Comparison(a.name, b.name, not found, len(a.leaves.keys() | b.leaves.keys()), found)


def _print(found: Comparison) -> None:
    print_line(f"A: {found.a}   B: {found.b}")
    if found.equal:
        print_line(f"equal: {found.leaves} leaves, bit for bit")
        return
    rows = [[each.path, _text_of(each)] for each in found.differences]
    tables.print_table(["LEAF", "DIFFERENCE"], rows)
    print_line(f"{len(rows)} of {found.leaves} leaves differ")


def _text_of(each: LeafDifference) -> str:
    if each.kind != "values":
        return _STRUCTURE.get(each.kind, "{0.kind} {0.a} in A, {0.b} in B").format(each)
    text = f"{each.elements} of {each.of} elements"
    if each.largest is not None:
        text += f", by at most {each.largest:.6g}"
    if each.not_numbers:
        text += f", {each.not_numbers} NaN or infinite on one side alone"
    return text
