"""The options that tell the size of a state and of a slot, for ``doctor``."""

from __future__ import annotations

import argparse

from emergency_ckpt.core.limits import SMALL_FILES_BYTES
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.tools.placement_study import held_bytes, stored_share

GIB = 1 << 30
_MIB = 1 << 20
MOST_GIB = 1e12


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    size = parser.add_argument_group("size of the state")
    size.add_argument("--state-gib", type=float, help="one replica; default: newest step in --dir")
    size.add_argument("--slices", type=int, default=2, help="data-parallel replicas")
    size.add_argument("--hosts-per-slice", type=int, default=1, help="processes of a slice")
    size.add_argument("--processes", type=int, default=1, help="processes that share the ramdisk")
    size.add_argument("--placement", default="all_but_primary", help="as the setting")
    size.add_argument("--local-keep-last-n", type=int, default=1, help="as the setting")


def add_host_state(parser: argparse.ArgumentParser) -> None:
    """Add the options of the size of host states."""
    parser.add_argument("--host-state-mib", type=float, default=0.0, help="of one process, MiB")


def host_state_bytes(args: argparse.Namespace, command: str) -> int:
    """Return the bytes of one process's host state. ConfigError."""
    if not 0 <= args.host_state_mib < MOST_GIB:
        problem = f"--host-state-mib must be 0 or more, not {args.host_state_mib}"
        raise ConfigError([problem], target=command)
    return round(args.host_state_mib * _MIB)


def process_bytes(args: argparse.Namespace, state_bytes: int, command: str) -> int:
    """Return what one process needs in its ramdisk: slots, host states and small files."""
    slots, host = args.local_keep_last_n + 1, host_state_bytes(args, command)
    needed = held_bytes(slot_bytes(args, state_bytes), host, args.slices - 1, slots)
    return round(needed) + SMALL_FILES_BYTES


def check_size(args: argparse.Namespace, command: str) -> None:
    """Raise ConfigError when the options are out of their range."""
    problems = [
        f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
        for name in ("slices", "hosts_per_slice", "processes", "local_keep_last_n")
        if getattr(args, name) < 1
    ]
    if args.state_gib is not None and not 0 < args.state_gib < MOST_GIB:
        problems.append(f"--state-gib must be above 0 and below {MOST_GIB}, not {args.state_gib}")
    if problems:
        raise ConfigError(problems, target=command)
    parse_placement(args.placement)


def given_bytes(args: argparse.Namespace) -> int | None:
    """Return the bytes of one replica as given on the command line, or None."""
    return None if args.state_gib is None else round(args.state_gib * GIB)


def slot_bytes(args: argparse.Namespace, state_bytes: int) -> int:
    """Return the bytes of one slot of one process, of a state of ``state_bytes`` per replica."""
    share = stored_share(parse_placement(args.placement), args.slices) / args.hosts_per_slice
    return round(state_bytes * share)
