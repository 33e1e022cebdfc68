"""``eckpt serve``: serves a host's ramdisk to drains and looks while its trainer is down."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

from emergency_ckpt import run_secret
from emergency_ckpt.background import SignalFlag
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.ram.ownership import ROOT_UID
from emergency_ckpt.tools.cli.arguments import (
    add_addresses,
    add_owner,
    add_secret_file,
    port,
    seconds,
)
from emergency_ckpt.tools.cli.output import tell
from emergency_ckpt.tools.draining.last import LastDrain
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.tools.signals import handling
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer

LET_GO_S = 2.0
"""Time between two looks whether directories or slots were removed."""
_LONGEST_INTERVAL_S = 60.0


EXAMPLE = "eckpt serve --local-dir /dev/shm/eckpt --run-id run7 --secret-file secret"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    parser.description = (
        "Serves the saves of a run on this host's ramdisk, read-only, to all that know the run's"
        " secret. Prints one line, 'serving IDENTITY@HOST:PORT', and runs until SIGINT or SIGTERM."
        " Give that text to 'eckpt drain --peers' on another host, which brings the newest step to"
        " storage: with the identity, which is new at each start, only this server is accepted;"
        " without it, any that knows the secret. The directories are not deleted meanwhile, but by"
        " 'eckpt doctor --clean --served'. With --drain-to it drains the RAM of a job that is over."
    )
    parser.add_argument("--local-dir", type=Path, required=True, help="the ramdisk directory")
    parser.add_argument("--run-id", required=True, help="the run whose saves are served")
    add_secret_file(parser, "file with the run's secret, closed to others")
    add_owner(
        parser,
        "owner of the ramdisk, by name or number, when root serves it: files of other users are"
        " not served",
    )
    parser.add_argument("--bind", default="127.0.0.1", help="the one address to listen on")
    parser.add_argument("--port", type=port, default=0, help="port, 0 for a free one")
    _add_drain(parser.add_argument_group("drain the RAM when the job is over for good"))


def _add_drain(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--drain-to",
        default="",
        metavar="DIR",
        help="the job's dir: one of its servers runs 'eckpt drain' there, and the others"
        " serve it; needs --drain-after or --drain-at-stop",
    )
    group.add_argument(
        "--drain-after",
        type=seconds,
        metavar="SECONDS",
        help="drain when no process of the job was there for so long. One that starts again later"
        " loses nothing",
    )
    group.add_argument(
        "--drain-at-stop",
        type=seconds,
        metavar="SECONDS",
        help="drain at SIGTERM, before the RAM of this host goes, unless processes of the job still"
        " answer elsewhere after so long. A second signal ends it",
    )
    several = "a name may stand for several"
    add_addresses(group, "--peers", f"addresses of the servers of the job's hosts; {several}")
    add_addresses(group, "--trainers", f"addresses of its processes; {several}")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Blocks; return 0 after a clean stop. Main thread only.

    The first signal lets a drain go on, or begins one; the second one ends the drain.
    """
    if bool(args.drain_to) != (args.drain_after is not None or args.drain_at_stop is not None):
        problem = "--drain-to and --drain-after or --drain-at-stop need each other"
        raise ConfigError([problem], target="eckpt serve")
    if (args.peers or args.trainers) and not args.drain_to:
        raise ConfigError(["--peers and --trainers need --drain-to"], target="eckpt serve")
    stopping, hurrying = SignalFlag(), SignalFlag()

    def stop(_: int) -> None:
        (hurrying if stopping.is_set() else stopping).set()

    with handling((signal.SIGTERM, signal.SIGINT), stop):
        return _serve(args, stopping, hurrying)


def _serve(args: argparse.Namespace, stopping: SignalFlag, hurrying: SignalFlag) -> int:
    secret = run_secret.secret_for_tools(args.secret_file)
    if secret is None:
        problem = f"no secret: give --secret-file or set {run_secret.SECRET_VARIABLE}"
        raise ConfigError([problem], target="eckpt serve")
    if args.drain_to and os.geteuid() != ROOT_UID:
        # Beside a trainer of this user that has not started. A directory of root is closed to
        # the user of a trainer.
        args.local_dir.mkdir(mode=0o700, exist_ok=True)
    holdings = ReadOnlyRamdisk(args.local_dir, args.run_id, args.owner)
    try:
        server = TransferServer(
            holdings,
            run_id=args.run_id,
            secret=secret,
            bind_host=args.bind,
            port=args.port,
        )
        holdings.address = server.contact
        holdings.inventory()  # takes the readers' locks before the address is printed
        with server:
            tell(f"serving {server.contact}", sys.stdout)
            if args.drain_to:
                _serve_and_drain(args, holdings, server.address, secret, stopping, hurrying)
            else:
                _stopped(stopping, holdings)
    finally:
        holdings.close()
    return 0


def _stopped(stopping: SignalFlag, holdings: ReadOnlyRamdisk, within_s: float = math.inf) -> bool:
    """Wait for ``within_s`` seconds; return True when told to stop.

    Meanwhile the memory is given back of directories that ``eckpt doctor --clean`` removed, and of
    slots that a trainer deleted.
    """
    end_s = time.monotonic() + within_s
    while (left_s := end_s - time.monotonic()) > 0:
        if stopping.wait(min(left_s, LET_GO_S)):
            return True
        holdings.let_go()
    return False


def _say(text: str) -> None:
    tell(f"eckpt serve: {text}", sys.stdout)


def _serve_and_drain(
    args: argparse.Namespace,
    holdings: ReadOnlyRamdisk,
    own: str,
    secret: bytes,
    stopping: SignalFlag,
    hurrying: SignalFlag,
) -> None:
    with TransferClient(run_id=args.run_id, secret=secret) as client:
        last = LastDrain(args, own, client, _say, stopping, hurrying)
        if args.drain_after is None:
            _stopped(stopping, holdings)
        else:
            interval_s = min(max(args.drain_after / 60, 1.0), _LONGEST_INTERVAL_S)
            while not _stopped(stopping, holdings, interval_s):
                last.poll(time.monotonic(), args.drain_after)
        if args.drain_at_stop is not None:
            last.at_end(args.drain_at_stop)
