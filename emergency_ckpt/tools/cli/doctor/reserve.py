"""``eckpt doctor --reserve``: makes the pages of a slot on a host without one, ahead of a start."""

from __future__ import annotations

import argparse
import sys

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tiers.ramdisk.reserve import has_slots, reserve_slot
from emergency_ckpt.tools.cli.doctor.sizing import given_bytes, slot_bytes


def run(args: argparse.Namespace) -> int:
    """Reserve the slots; return 0, also when the host needs none."""
    if args.local_dir is None or args.run_id is None:
        raise ConfigError(["give --local-dir and --run-id"], target="eckpt doctor --reserve")
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
        raise ConfigError(
            ["give --state-gib, or --dir with a step in it"], target="eckpt doctor --reserve"
        )
    # Orbax, which this imports, takes a second to load.
    from emergency_ckpt.tools.cli.doctor.storage import newest_state_bytes  # noqa: PLC0415

    finding, found = newest_state_bytes(args.dir, args.timeout)
    if found is None:
        print(f"{finding.text}; {finding.mend}", file=sys.stderr)
        raise ConfigError(
            ["give --state-gib: no step tells the size"], target="eckpt doctor --reserve"
        )
    return found
