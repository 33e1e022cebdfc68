"""``eckpt reserve``: makes the pages of a slot on a host without one, ahead of a start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tiers.ramdisk.locks import check_run_id
from emergency_ckpt.tiers.ramdisk.reserve import has_slots, reserve_slot
from emergency_ckpt.tools.cli.arguments import seconds
from emergency_ckpt.tools.cli.doctor.sizing import add_size, check_size, given_bytes, slot_bytes

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``reserve``."""
    parser = subparsers.add_parser(
        "reserve",
        help="make the pages of a slot on a host that lost its ramdisk, ahead of a start",
        description=(
            "Makes the memory pages of one slot for each process of this host, so that a restore"
            " after a loss does not wait for them. Run it beside the start of the trainer, which"
            " takes the slots as they are when it opens its ramdisk. A host that has slots of the"
            " run keeps them, and gets none. Nothing is removed for it."
        ),
    )
    parser.add_argument("--local-dir", type=Path, required=True, help="the ramdisk directory")
    parser.add_argument("--run-id", required=True, help="the run")
    parser.add_argument("--dir", help="the persistent directory, for the size of its newest step")
    add_size(parser)
    parser.add_argument(
        "--timeout-s", type=seconds, default=20.0, help="longest wait for storage (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reserve the slots; return 0, also when the host needs none."""
    check_size(args, "eckpt reserve")
    check_run_id(args.run_id)
    if has_slots(args.local_dir, args.run_id):
        print(f"{args.local_dir} has slots of run {args.run_id!r}: nothing to reserve")
        return 0
    size_bytes = slot_bytes(args, _state_bytes(args))
    for process in range(args.processes):
        made = reserve_slot(args.local_dir, args.run_id, process, size_bytes)
        print(f"reserved {size_text(made)} of {size_text(size_bytes)} in {args.local_dir}")
    return 0


def _state_bytes(args: argparse.Namespace) -> int:
    given = given_bytes(args)
    if given is not None:
        return given
    if args.dir is None:
        raise ConfigError(["give --state-gib, or --dir with a step in it"], target="eckpt reserve")
    # Orbax, which this imports, takes a second to load.
    from emergency_ckpt.tools.cli.doctor.storage import newest_state_bytes  # noqa: PLC0415

    finding, found = newest_state_bytes(args.dir, args.timeout_s)
    if found is None:
        print(f"{finding.text}; {finding.mend}", file=sys.stderr)
        raise ConfigError(["give --state-gib: no step tells the size"], target="eckpt reserve")
    return found
