"""``eckpt fake-gcs``: the test server of ``emergency_ckpt.testing.gcs`` in the foreground."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from emergency_ckpt.cli.arguments import mebibytes, port

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

_MIB = 1 << 20


def add_parser(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "fake-gcs",
        help="run a Google Cloud Storage server for tests, in memory",
        description=(
            "Runs until SIGINT or SIGTERM. Prints the environment that TensorStore, gcsfs,"
            " google-cloud-storage and Orbax need to use it, ready for a shell's eval."
        ),
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=port, default=0, help="port, 0 for a free one (%(default)s)")
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="create this bucket; repeatable",
    )
    parser.add_argument(
        "--object-mib", type=mebibytes, default=4096, help="largest object, MiB (%(default)s)"
    )
    parser.add_argument(
        "--total-mib", type=mebibytes, default=16384, help="most bytes held, MiB (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Blocks."""
    # Imported here, so that `eckpt --help` does not import the HTTP server.
    from emergency_ckpt.testing.gcs import (  # noqa: PLC0415
        GcsControl,
        Limits,
        ServeOptions,
        serve_in_foreground,
    )

    def announce(url: str) -> None:
        print(f"# fake GCS on {url}, in memory, until interrupted")
        for name, value in GcsControl(url).environment().items():
            print(f"export {name}={shlex.quote(value)}", flush=True)

    limits = Limits(object_bytes=args.object_mib * _MIB, total_bytes=args.total_mib * _MIB)
    options = ServeOptions(
        host=args.host, port=args.port, buckets=tuple(args.bucket), limits=limits
    )
    serve_in_foreground(options, announce)
    return 0
