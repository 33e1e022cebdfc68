"""``eckpt doctor``: checks of a host before a job starts there.

1. ``checks``: versions and the native engine; the secret and peers; storage, where a small
   file is written, read and removed, and the size of the newest step; the ramdisk, its owner, room,
   pages and memory.
2. ``findings``: what a check finds; ``sizing``: the options that tell the size of a slot.

Only the check of storage writes, and it removes what it has written. ``--clean`` and ``--adopt``
(``clean``) take the place of the checks.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from emergency_ckpt.core.wording import count_text, size_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.ram.locks import check_run_id
from emergency_ckpt.ram.other_runs import GRACE_S
from emergency_ckpt.tools.cli.arguments import (
    add_json,
    add_timeout,
    addresses,
    duration,
    print_json,
)
from emergency_ckpt.tools.cli.doctor.findings import Finding, exit_status, show, worst
from emergency_ckpt.tools.cli.doctor.sizing import (
    add_host_state,
    add_size,
    check_size,
    given_bytes,
    process_bytes,
    slot_bytes,
)

_EPILOG = """\
exit status
  0  a job can start here (there may be warnings)
  1  a check failed, or with --strict warned
  2  the command line is wrong
"""


EXAMPLE = "eckpt doctor --local-dir /dev/shm/eckpt --dir gs://bucket/run7 --run-id run7 --slices 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.description = (
        "Checks versions, the native engine, the secret, and what is named: a ramdisk, a"
        " persistent directory, peers. Each check is ok, a warning or a failure, with a"
        " sentence that says how to mend it. Storage is tried with a small file, which is"
        " removed; nothing else is written. With --clean or --adopt it does that alone."
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
    add_size(parser)
    add_host_state(parser)
    parser.add_argument("--secret-file", type=Path, help="as the setting; default: $ECKPT_SECRET")
    parser.add_argument(
        "--peers",
        type=addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="connect to these; with a secret and --run-id also prove to know the secret",
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
        help="with --clean: only what is unchanged for this time: 90s, 30m, 12h, 7d, 0 (default:"
        " 1d)",
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
    if args.json:
        print_json({"status": worst(findings), "checks": findings})
    else:
        show(findings)
    return exit_status(findings, strict=args.strict)


def _check(args: argparse.Namespace) -> None:
    check_size(args, "eckpt doctor")
    if args.yes and not args.clean:
        raise ConfigError(["--yes needs --clean"], target="eckpt doctor")
    if args.served and not (args.clean and args.run_id and args.peers):
        problem = "--served needs --clean, --run-id, and --peers of the run's trainers"
        raise ConfigError([problem], target="eckpt doctor")
    if args.json and (args.clean or args.adopt):
        raise ConfigError(["--clean and --adopt print no JSON"], target="eckpt doctor")
    if args.run_id is not None:
        check_run_id(args.run_id)


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
    state_bytes = given_bytes(args)
    if state_bytes is None and args.dir is not None:
        finding, state_bytes = checks.newest_state_bytes(args.dir, args.timeout)
        yield finding
    if args.local_dir is not None:
        needed_bytes, spare_bytes = None, 0
        if state_bytes is not None:
            needed_bytes = args.processes * process_bytes(args, state_bytes, "eckpt doctor")
            spare_bytes = args.processes * slot_bytes(args, state_bytes)
            yield _slots(args, needed_bytes)
        yield from checks.check_ramdisk(args.local_dir, args.run_id, needed_bytes, spare_bytes)


def _slots(args: argparse.Namespace, needed_bytes: int) -> Finding:
    slots = args.processes * (args.local_keep_last_n + 1)
    slots_text = count_text(slots, "slot", "slots")
    text = f"{slots_text} on this host, {size_text(needed_bytes)} in all with host states"
    return Finding("slots", "ok", text, measured={"slots": slots, "needed_bytes": needed_bytes})
