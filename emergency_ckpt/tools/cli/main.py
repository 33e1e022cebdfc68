"""``eckpt``: one command; its subcommands are listed here and imported on use.

A subcommand is a module of this package with two functions: ``add_parser(subparsers)`` adds its
argument parser under its own name, ``run(args) -> int`` does the work and returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.tiers.storage.calls import THREAD_NAME

USAGE_EXIT_CODE = 2

_DISTRIBUTION = "emergency-ckpt"
_CLI = "emergency_ckpt.tools.cli"


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
      module: its module.
      summary: one line for the list of commands, available without importing the module.
      group: the title below which the list has it.
      extra: the optional dependencies of this package that it needs.
      takes_command: it takes a program and its arguments after ``--``.
    """

    module: str
    summary: str
    group: str
    extra: str = ""
    takes_command: bool = False


LOOK, PREPARE, RUN, MAINTAIN = "Look", "Prepare", "Run", "Maintain"

COMMANDS = {
    "ls": Command(f"{_CLI}.look.ls", "list runs and steps in each tier", LOOK),
    "show": Command(
        f"{_CLI}.look.show",
        "show the leaves, shards and host states of a step",
        LOOK,
    ),
    "check": Command(
        f"{_CLI}.look.check",
        "verify manifests, markers and signatures, and every byte with --read-data",
        LOOK,
    ),
    "explain": Command(f"{_CLI}.look.explain", "tell the story of the last restore", LOOK),
    "survives": Command(
        f"{_CLI}.look.survives",
        "show which hosts or slices would cost the newest step",
        LOOK,
    ),
    "diff": Command(f"{_CLI}.look.diff", "compare two steps, leaf by leaf", LOOK),
    "report": Command(
        f"{_CLI}.look.report",
        "write an HTML report of a run from its event log",
        LOOK,
        "report",
    ),
    "launch": Command(
        f"{_CLI}.launch",
        "run a training job as several slices on this machine, and restart it when it dies",
        RUN,
        takes_command=True,
    ),
    "serve": Command(
        f"{_CLI}.serve",
        "serve this host's ramdisk to peers while its trainer is down",
        RUN,
    ),
    "demo": Command(
        f"{_CLI}.demo",
        "lose a slice in the middle of training and recover",
        RUN,
        "demo",
    ),
    "drain": Command(
        f"{_CLI}.drain",
        "write the newest step in RAM to storage, when a job has died for good",
        MAINTAIN,
    ),
    "export": Command(f"{_CLI}.export", "write a step as a directory of plain Orbax", MAINTAIN),
    "clean": Command(
        f"{_CLI}.clean",
        "list and remove leftover runs on this host's ramdisk",
        MAINTAIN,
    ),
    "plan-placement": Command(
        f"{_CLI}.plan_placement",
        "compute cost and survival of each number of copies, and recommend one",
        PREPARE,
    ),
    "deploy": Command(
        f"{_CLI}.deploy",
        "write the manifests of a job for an engine (GKE)",
        PREPARE,
        takes_command=True,
    ),
    "doctor": Command(f"{_CLI}.doctor", "check a host before a job starts there", PREPARE),
    "reserve": Command(
        f"{_CLI}.reserve",
        "make the pages of a slot on a host that lost its ramdisk, ahead of a start",
        PREPARE,
    ),
}
_GROUPS = {
    LOOK: "read-only, also while a job runs or after its host's processes died",
    PREPARE: "before a job starts",
    RUN: "jobs and servers",
    MAINTAIN: "these change a ramdisk or storage",
}
_HELP_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code. 2: wrong command line, or a missing package.

    As a program (without ``argv``) it ends the process where storage has not answered a call: the
    interpreter's own end aborts in the thread of a client that is answered meanwhile.
    """
    status = _run(list(sys.argv[1:] if argv is None else argv))
    calls = [each for each in threading.enumerate() if each.name.startswith(THREAD_NAME)]
    if argv is None and calls:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(arguments: list[str]) -> int:
    own, program = _split_program(arguments)
    name = next((word for word in own if not word.startswith("-")), "")
    try:
        module = _load(name) if name in COMMANDS else None
        parser = _parser(name, module)
        args = parser.parse_args(own)
        if module is None:
            parser.print_help(sys.stderr)
            return USAGE_EXIT_CODE
        if program is not None and not COMMANDS[name].takes_command:
            parser.error(f"{name} takes nothing after --")
        args.program, args.words, args.command = program or [], arguments, name
        return int(module.run(args))
    except ModuleNotFoundError as error:
        return _fail(name, _missing_package(name, error))
    except ConfigError as error:
        return _fail(name, str(error))
    except (CheckpointError, OSError) as error:
        # Also a directory that cannot be created, or a port in use.
        _fail(name, str(error))
        return 1


def _split_program(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    # By hand, because argparse's treatment of "--" inside subcommands differs between versions.
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _load(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name].module)


def _parser(name: str, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eckpt",
        description="Multi-tier emergency checkpointing for JAX training.",
        epilog=_list_of_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(metavar="COMMAND", help="one of those below")
    for other in COMMANDS:
        if module is None or other != name:
            subparsers.add_parser(other, add_help=False)
        else:
            module.add_parser(subparsers)
    return parser


def _list_of_commands() -> str:
    """Return the commands by group; argparse has no groups of subcommands."""
    longest = max(map(len, COMMANDS))
    lines: list[str] = []
    for group, meaning in _GROUPS.items():
        lines += ["", f"{group}: {meaning}"]
        for name, command in COMMANDS.items():
            if command.group == group:
                indent = " " * (longest + 4)
                text = f"  {name:{longest}}  {command.summary}"
                lines.append(textwrap.fill(text, _HELP_WIDTH, subsequent_indent=indent))
    return "\n".join([*lines, "", "eckpt COMMAND --help describes each."]).lstrip()


def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed (running from a source tree)"


def _missing_package(name: str, error: ModuleNotFoundError) -> str:
    missing, extra = error.name or "", COMMANDS[name].extra
    if missing.startswith("emergency_ckpt."):
        return f"this installation lacks {missing}; build and install the package again"
    package = f"{_DISTRIBUTION}[{extra}]" if extra else _DISTRIBUTION
    return f"needs the package {missing!r}, which is not installed; pip install '{package}'"


def _fail(name: str, message: str) -> int:
    print(f"eckpt {name}: {message}", file=sys.stderr)
    return USAGE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
