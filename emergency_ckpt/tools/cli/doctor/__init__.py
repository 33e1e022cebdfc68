"""``eckpt doctor``: checks of a host before a job starts there.

1. ``checks``: versions and the native engine; the secret and peers; storage, where a small
   file is written, read and removed, and the size of the newest step; the ramdisk, its owner, room,
   pages and memory.
2. ``clean``: ``--clean`` and ``--adopt``, which take the place of the checks.

The check of storage removes the file that the check has written, and makes no directory. No other
check writes.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emergency_ckpt.core.limits import SMALL_FILES_BYTES
from emergency_ckpt.core.wording import count_text, size_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.paths import dir_problems, local_dir_problems, plain_path
from emergency_ckpt.ram.leftovers import GRACE_S
from emergency_ckpt.ram.locks import check_run_id
from emergency_ckpt.tools.cli.arguments import (
    add_addresses,
    add_gib,
    add_host_state,
    add_json,
    add_secret_file,
    add_timeout,
    duration,
    positive,
    print_json,
)
from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.placement_study import process_ram

_EPILOG = """\
exit status
  0  a job can start here (there may be warnings)
  1  a check failed, or with --strict warned
  2  the command line is wrong
"""
EXAMPLE = "eckpt doctor --local-dir /dev/shm/eckpt --dir gs://bucket/run7 --run-id run7 --slices 4"

if TYPE_CHECKING:
    from emergency_ckpt.tools.cli.doctor.checks import Finding, Status

_WORST_FIRST: tuple[Status, ...] = ("failure", "warning", "ok")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.description = (
        "Checks versions, the native engine, the secret, and what is named: a ramdisk, a"
        " persistent directory, peers. Each check is ok, a warning or a failure, with a"
        " sentence that says how to mend it. Storage is tried with a small file, which is"
        " removed, in the folder host_state, which stays; nothing else is written. With --clean"
        " or --adopt it does that alone."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "--local-dir", type=Path, metavar="DIR", help="the ramdisk directory of this host"
    )
    parser.add_argument("--dir", help="the persistent directory: a path, or a URL such as gs://")
    parser.add_argument(
        "--run-id",
        help="the run: its files on the ramdisk are room for it, and --peers are of it",
    )
    size = parser.add_argument_group("size of the state")
    add_gib(size, "--state-gib", "one replica; default: newest step in --dir")
    size.add_argument("--slices", type=positive, default=2, help="data-parallel replicas")
    size.add_argument("--hosts-per-slice", type=positive, default=1, help="processes of a slice")
    size.add_argument(
        "--processes", type=positive, default=1, help="processes that share the ramdisk"
    )
    size.add_argument("--placement", default="all_but_primary", help="as the setting")
    size.add_argument("--local-keep-last-n", type=positive, default=1, help="as the setting")
    add_host_state(size, "host state of one process")
    add_secret_file(parser, "as the setting")
    add_addresses(
        parser,
        "--peers",
        "connect to these; with a secret and --run-id also prove to know the secret",
    )
    parser.add_argument(
        "--link",
        action="store_true",
        help="also try what JAX's devices can do with host memory. Takes the devices: not beside a"
        " job that runs here",
    )
    add_timeout(parser, 20.0)
    parser.add_argument("--strict", action="store_true", help="warnings give exit status 1 too")
    add_json(parser)
    _add_mending(parser.add_argument_group("make room, take steps in"))


def _add_mending(mend: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    either = mend.add_mutually_exclusive_group()
    either.add_argument(
        "--clean",
        action="store_true",
        help="list the leftover runs in --local-dir, with size and age, and the steps in --dir that"
        " were rolled back. REMOVES nothing without --yes. A run stays while a live"
        " process owns or serves one of its directories",
    )
    mend.add_argument(
        "--served",
        action="store_true",
        help="with --clean, --run-id and --peers: remove a finished run although 'eckpt serve' has"
        " it, which then gives its memory back. Refused while a process of the run is on this host,"
        " answers at --peers, or may live there: name the ports of its trainers",
    )
    either.add_argument(
        "--adopt",
        action="store_true",
        help="take the steps that another program has written into --dir, beside a job's own, into"
        " the step log: from then on they count. With --run-id, give --dir to that run: the run on"
        " record, which must be over, saves there no more",
    )
    mend.add_argument(
        "--older-than",
        type=duration,
        default=GRACE_S,
        metavar="AGE",
        help="with --clean: only runs without a change, and steps hidden, for this time: 90s, 30m,"
        " 12h, 7d, 0 (default: 1d). 0 takes steps too of which storage does not tell the time",
    )
    mend.add_argument("--yes", action="store_true", help="with --clean: REMOVE what it lists")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; return 0 when a job can start here, else 1."""
    _check(args)
    # Imported here, so that a check does without what they need.
    if args.clean or args.adopt:
        from emergency_ckpt.tools.cli.doctor import clean  # noqa: PLC0415

        return clean.run(args) if args.clean else clean.adopt(args)
    findings = list(_findings(args))
    statuses = {finding.status for finding in findings}
    worst = next(status for status in _WORST_FIRST if status in statuses)
    if args.json:
        print_json({"status": worst, "checks": findings})
    else:
        show(findings)
    return 1 if worst == "failure" or (args.strict and worst == "warning") else 0


def _check(args: argparse.Namespace) -> None:
    parse_placement(args.placement)
    if args.yes and not args.clean:
        raise ConfigError(["--yes needs --clean"], target="eckpt doctor")
    if args.served and not (args.clean and args.run_id and args.peers):
        problem = "--served needs --clean, --run-id, and --peers of the run's trainers"
        raise ConfigError([problem], target="eckpt doctor")
    if args.clean and args.peers and not args.served:
        raise ConfigError(["--peers with --clean needs --served"], target="eckpt doctor")
    if args.json and (args.clean or args.adopt):
        raise ConfigError(["--clean and --adopt print no JSON"], target="eckpt doctor")
    if args.run_id is not None:
        check_run_id(args.run_id)
    problems: list[str] = []
    if args.dir is not None:
        problems += dir_problems(plain_path(args.dir))
    if args.local_dir is not None:
        problems += local_dir_problems(str(args.local_dir))
    if problems:
        raise ConfigError(problems, target="eckpt doctor")


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    # Imported here, so that `eckpt doctor --help` does not import numpy and the storage clients.
    from emergency_ckpt.tools.cli.doctor import checks  # noqa: PLC0415

    yield checks.check_versions()
    yield checks.check_engine()
    yield from checks.check_devices(os.environ)
    if args.link:
        yield checks.check_link()
    finding, secret = checks.check_secret(args.secret_file and str(args.secret_file), os.environ)
    yield finding
    yield from checks.check_peers(args.peers, args.run_id, secret, args.timeout)
    if args.dir is not None:
        yield checks.check_storage(args.dir, f"doctor-{secrets.token_hex(8)}", args.timeout)
    state_bytes = args.state_bytes
    if state_bytes is None and args.dir is not None:
        finding, state_bytes = checks.newest_state_bytes(args.dir, args.timeout)
        yield finding
    needed_bytes, spare_bytes = None, 0
    if state_bytes is not None:
        of_one = process_ram(
            parse_placement(args.placement),
            slices=args.slices,
            hosts_per_slice=args.hosts_per_slice,
            state_bytes=state_bytes,
            host_state_bytes=args.host_state_bytes,
            local_keep_last_n=args.local_keep_last_n,
        )
        needed_bytes = args.processes * (of_one.bytes + SMALL_FILES_BYTES)
        spare_bytes, slots = args.processes * of_one.slot_bytes, args.processes * of_one.slots
        text = f"{count_text(slots, 'slot', 'slots')} on this host, {size_text(needed_bytes)} in"
        measured = {"slots": slots, "needed_bytes": needed_bytes}
        yield checks.Finding("slots", "ok", f"{text} all with host states", measured=measured)
    if args.local_dir is not None:
        yield from checks.check_ramdisk(args.local_dir, args.run_id, needed_bytes, spare_bytes)


def show(findings: Sequence[Finding]) -> None:
    """Print one line for each finding, and one below it that says how to mend it."""
    for finding in findings:
        print_line(f"{finding.status:8} {finding.check:10} {finding.text}")
        if finding.mend:
            print_line(f"{'':20}{finding.mend}")
    counts = {status: sum(f.status == status for f in findings) for status in _WORST_FIRST}
    print_line(", ".join(f"{count} {status}" for status, count in counts.items() if count))
