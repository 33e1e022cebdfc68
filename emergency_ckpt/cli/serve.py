"""``eckpt serve``: serves a host's ramdisk to peers while its trainer is down."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from emergency_ckpt import run_secret as auth
from emergency_ckpt.cli.arguments import port, user_id
from emergency_ckpt.core.secret.keys import RunSecret
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tiers.local.read_only import ReadOnlyRamdisk
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import Security

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: SubParsers) -> None:
    """Add the parser of ``serve``."""
    parser = subparsers.add_parser(
        "serve",
        help="serve this host's ramdisk to peers while its trainer is down",
        description=(
            "Serves the saves of a run on this host's ramdisk, read-only, to peers that know the"
            " run's secret. Prints one line, 'serving IDENTITY@HOST:PORT', and runs until SIGINT"
            " or SIGTERM. Put that text into the job's extra_holders: with the identity, which is"
            " new at each start, only this server is accepted; without it, any that knows the"
            " secret. The directories are not deleted meanwhile."
        ),
    )
    parser.add_argument("--local-dir", type=Path, required=True, help="the ramdisk directory")
    parser.add_argument("--run-id", required=True, help="the run whose saves are served")
    parser.add_argument(
        "--secret-file",
        type=Path,
        help=f"file with the run's secret, closed to others; default: ${auth.SECRET_VARIABLE}",
    )
    parser.add_argument(
        "--owner",
        type=user_id,
        metavar="USER",
        help="owner of the ramdisk, by name or number, when root serves it; default: the user of"
        " this command. Files of other users are not served",
    )
    parser.add_argument(
        "--bind", default="127.0.0.1", help="the one address to listen on (%(default)s)"
    )
    parser.add_argument("--port", type=port, default=0, help="port, 0 for a free one (%(default)s)")
    parser.add_argument(
        "--transfer-security",
        choices=get_args(Security),
        default="mac",
        help="as the job's setting with this name (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Blocks; return 0 after a clean stop. Main thread only."""
    stopping = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    secret = _secret(args.secret_file)
    signer = Signer.of(RunSecret(args.run_id, secret, given=True))
    holdings = ReadOnlyRamdisk(args.local_dir, args.run_id, args.owner, signer)
    try:
        server = TransferServer(
            holdings,
            run_id=args.run_id,
            secret=secret,
            security=args.transfer_security,
            bind_host=args.bind,
            port=args.port,
        )
        holdings.address = server.contact
        holdings.inventory()  # takes the readers' locks before the address is printed
        with server:
            print(f"serving {server.contact}", flush=True)
            stopping.wait()
    finally:
        holdings.close()
    return 0


def _secret(path: Path | None) -> bytes:
    if path is not None:
        return auth.load_secret_file(path)
    secret = auth.secret_from_environment(os.environ)
    if secret is None:
        raise ConfigError(
            [f"no secret: give --secret-file or set {auth.SECRET_VARIABLE}"], target="eckpt serve"
        )
    return secret
