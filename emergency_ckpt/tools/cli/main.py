"""``eckpt``: one command; its subcommands are listed here and imported on use.

A subcommand is a module of this package with ``EXAMPLE``, a command line that ``--help`` shows, and
two functions: ``add_arguments(parser)`` adds its description and arguments, ``run(args) -> int``
does the work and returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.storage.calls import THREAD_NAME
from emergency_ckpt.tools.cli.output import print_line

USAGE_EXIT_CODE = 2

_DISTRIBUTION = "emergency-ckpt"
_CLI = "emergency_ckpt.tools.cli"


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
      module: its module.
      summary: one line for the list of commands, available without importing the module.
      takes_command: it takes a program and its arguments after ``--``.
    """

    module: str
    summary: str
    takes_command: bool = False


COMMANDS = {
    "ls": Command(
        f"{_CLI}.ls",
        "list runs and steps in each tier; show a step, check all, tell what a loss would cost and"
        " why the last restore took its step",
    ),
    "report": Command(
        f"{_CLI}.report",
        "print the figures of a run from its event log, and write a page and a trace",
    ),
    "plan": Command(
        f"{_CLI}.plan",
        "compute cost and survival of each number of copies, and recommend one; with --gke fill the"
        " manifests of a job on GKE and check them",
        takes_command=True,
    ),
    "doctor": Command(
        f"{_CLI}.doctor",
        "check a host before a job starts there; with --clean remove leftover runs",
    ),
    "launch": Command(
        f"{_CLI}.launch",
        "run a training job as several slices on this machine, and restart it when it dies",
        takes_command=True,
    ),
    "serve": Command(
        f"{_CLI}.serve", "serve this host's ramdisk to drains while its trainer is down"
    ),
    "drain": Command(
        f"{_CLI}.drain",
        "write the newest step in RAM to storage, when a job has died for good",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code. 2: wrong command line, or a missing package.

    As a program (without ``argv``) the function ends the process where storage has not answered a
    call: the interpreter's own end aborts in the thread of a client that is answered meanwhile.
    """
    if argv is None:
        _open_closed_streams()
    status = _run(list(sys.argv[1:] if argv is None else argv))
    calls = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    if argv is None and calls:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_closed_streams() -> None:
    """Let output that a shell has closed go nowhere: else the next file opened is written to."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the whole program
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _run(arguments: list[str]) -> int:
    name = _name_in(arguments)
    try:
        args = parse(arguments)
        return USAGE_EXIT_CODE if args is None else int(_load(name).run(args))
    except ModuleNotFoundError as error:
        return _fail(name, _missing_package(error))
    except ConfigError as error:
        return _fail(name, str(error))
    except (CheckpointError, OSError) as error:
        # Also a directory that cannot be created, or a port in use.
        _fail(name, str(error))
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as a shell says of a program that a signal ended


def parse(arguments: list[str]) -> argparse.Namespace | None:
    """Return the arguments of a command line, or None, with help printed, without a command.

    Raises:
      SystemExit: the command line is wrong, or asks for help or the version.
    """
    own, program = _split_program(arguments)
    name = _name_in(arguments)
    parser = _parser(name)
    args = parser.parse_args(own)
    if name not in COMMANDS:
        parser.print_help(sys.stderr)
        return None
    if program is not None and not COMMANDS[name].takes_command:
        parser.error(f"{name} takes nothing after --")
    args.program, args.words, args.command = program or [], arguments, name
    return args


def _name_in(arguments: list[str]) -> str:
    own, _ = _split_program(arguments)
    return next((word for word in own if not word.startswith("-")), "")


def _split_program(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    # By hand, because argparse's treatment of "--" inside subcommands differs between versions.
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _load(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name].module)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eckpt",
        description="Multi-tier emergency checkpointing for JAX training.",
        epilog="eckpt COMMAND --help describes each.",
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands = {
        command_name: subparsers.add_parser(
            command_name, help=command.summary, formatter_class=_Help
        )
        for command_name, command in COMMANDS.items()
    }
    if name in commands:  # a command does not import the modules of the others
        named, module = commands[name], _load(name)
        module.add_arguments(named)
        named.epilog = f"{named.epilog or ''}\n\nexample:\n  {module.EXAMPLE}".lstrip()
    return parser


class _Help(argparse.HelpFormatter):
    """Shows each default, and keeps lines that are indented as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        is_shown = isinstance(default, str | int | float | os.PathLike) and default != ""
        if not text or "default:" in text or isinstance(default, bool) or not is_shown:
            return text
        return text if default == argparse.SUPPRESS else f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            line if line[:1] in ("", " ") else textwrap.fill(line, width)
            for line in text.split("\n")
        )
        return "\n".join(indent + line for line in lines)


def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed (running from a source tree)"


def _missing_package(error: ModuleNotFoundError) -> str:
    missing = error.name or ""
    if missing.startswith("emergency_ckpt."):
        return f"this installation lacks {missing}; build and install the package again"
    return f"needs the package {missing!r}, which is not installed; pip install '{_DISTRIBUTION}'"


def _fail(name: str, message: str) -> int:
    print_line(f"eckpt {name}: {message}", sys.stderr)
    return USAGE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
