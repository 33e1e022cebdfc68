"""Types of command-line arguments, those that name places, exit codes and ``--json``."""

from __future__ import annotations

import argparse
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from emergency_ckpt import run_secret
from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.limits import MAX_STEP
from emergency_ckpt.core.wording import encodable
from emergency_ckpt.errors import ConfigError, TransferError
from emergency_ckpt.tools.survey.places import Places

_LONGEST_S = 1e7
_LARGEST_BYTES = 1 << 60
_LARGEST_COUNT = 10**6


def port(text: str) -> int:
    """Return a port, or 0 for a free one."""
    return _between(text, 0, 65535)


def seconds(text: str) -> float:
    """Return a time above 0 and below four months."""
    value = _number(text)
    if not 0 < value < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below {_LONGEST_S:.0f}")
    return value


def gib(text: str) -> int:
    """Return the bytes of a size in GiB, at least one byte."""
    return _size(text, 1 << 30, least_bytes=1)


def mib(text: str) -> int:
    """Return the bytes of a size in MiB, which may be 0."""
    return _size(text, 1 << 20, least_bytes=0)


def _size(text: str, unit_bytes: int, *, least_bytes: int) -> int:
    size_bytes = _number(text) * unit_bytes
    if not least_bytes <= size_bytes <= _LARGEST_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a size of {least_bytes} bytes to 1 EiB")
    return round(size_bytes)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return a time of at least 0, in seconds or with a unit: 90s, 30m, 12h, 7d."""
    unit_s = _UNITS_S.get(text[-1:])
    try:
        value = float(text) if unit_s is None else float(text[:-1]) * unit_s
    except ValueError as error:
        problem = f"{text!r} is not a time such as 90s, 12h or 7d"
        raise argparse.ArgumentTypeError(problem) from error
    if not 0 <= value < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {_LONGEST_S:.0f} seconds")
    return value


def positive(text: str) -> int:
    """Return a count of at least 1."""
    return _between(text, 1, _LARGEST_COUNT)


def step_number(text: str) -> int:
    """Return the number of a step."""
    return _between(text, 0, MAX_STEP)


def user_id(text: str) -> int:
    """Return a user of this host, by name or number; a number need not have a name."""
    if text.isascii() and text.isdigit():
        return _between(text, 0, 2**32 - 2)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a user of this host") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


def _between(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
    return value


GOOD, BAD = 0, 1
EXIT_CODES = (
    "exit status: 0 all is well; 1 something is damaged, absent, or could not be read;"
    " 2 the command line is wrong"
)
"""Of all commands that look; docs/inspection.md has the same words."""


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name what to look at."""
    parser.add_argument(
        "--local-dir",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a ramdisk (local_dir of the job), of a live job or a dead host; may be repeated",
    )
    parser.add_argument(
        "--dir", default="", metavar="DIR", help="the persistent tier: a path, or a URL as gs://"
    )
    parser.add_argument("--run-id", help="only this run (default: all)")
    add_owner(parser, "owner of the ramdisks, by name or number, when root looks")
    add_timeout(parser)
    add_json(parser)


_Options = argparse._ActionsContainer  # pyright: ignore[reportPrivateUsage]
"""A parser, or a group of its arguments."""


def add_peers(parser: _Options, text: str) -> None:
    """Add ``--peers``, of which ``text`` says what is asked of them, and the secret for it."""
    add_addresses(parser, "--peers", text)
    add_secret_file(parser, "with --peers: file with the run's secret")


def add_addresses(parser: _Options, name: str, text: str) -> None:
    """Add an option that takes addresses of processes."""
    parser.add_argument(name, type=addresses, default=(), metavar="HOST:PORT,...", help=text)


def add_secret_file(parser: _Options, text: str) -> None:
    """Add ``--secret-file``."""
    default = f"default: ${run_secret.SECRET_VARIABLE}, if set"
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help=f"{text}; {default}")


def add_gib(parser: _Options, name: str, text: str, *, required: bool = False) -> None:
    """Add an option for a size in GiB; ``--state-gib`` gives ``state_bytes``, or None."""
    dest = name.removeprefix("--").removesuffix("gib").replace("-", "_") + "bytes"
    parser.add_argument(name, dest=dest, type=gib, metavar="GIB", required=required, help=text)


def add_host_state(parser: _Options, text: str) -> None:
    """Add ``--host-state-mib``, which gives ``host_state_bytes``."""
    parser.add_argument(
        "--host-state-mib",
        dest="host_state_bytes",
        type=mib,
        default=0,
        metavar="MIB",
        help=text,
    )


def add_owner(parser: _Options, text: str) -> None:
    """Add ``--owner``."""
    default = "default: the user of this command"
    parser.add_argument("--owner", type=user_id, metavar="USER", help=f"{text}; {default}")


def add_timeout(parser: argparse.ArgumentParser, default_s: float = 60.0) -> None:
    """Add ``--timeout``."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=default_s,
        metavar="SECONDS",
        help="maximum time of one call to storage, or to a peer",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on the standard output"
    )


def places_of(args: argparse.Namespace, *, may_be_none: bool = False) -> Places:
    """Return the places of a command line. ConfigError for a bad secret, or without any place.

    A secret is read where peers are asked, and nowhere else.
    """
    if not (may_be_none or args.local_dir or args.dir):
        raise ConfigError(["name --local-dir, --dir or both"], target=f"eckpt {args.command}")
    return Places(
        local_dirs=tuple(dict.fromkeys(args.local_dir)),
        directory=args.dir,
        run_id=args.run_id,
        secret=run_secret.secret_for_tools(args.secret_file) if args.peers else None,
        owner_uid=args.owner,
        timeout_s=args.timeout,
    )


def print_json(document: object) -> None:
    """Print a document of structs, dataclasses and mappings as one line of JSON for programs."""
    try:
        line = msgspec.json.encode(document)
    except UnicodeEncodeError:  # the name of a file that was listed, or named here
        line = msgspec.json.encode(_encodable(msgspec.to_builtins(document, str_keys=True)))
    sys.stdout.write(line.decode() + "\n")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {encodable(key): _encodable(item) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in cast("Sequence[Any]", value)]
    return value


def addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of ``HOST:PORT,...``, each with or without an identity before it."""
    found = tuple(address for address in text.split(",") if address)
    for address in found:
        try:
            parse_address(split_holder(address)[1])
        except TransferError as error:
            problem = f"{address!r} is not HOST:PORT or [IPv6 address]:PORT"
            raise argparse.ArgumentTypeError(problem) from error
    return found
