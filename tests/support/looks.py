"""Runs of ``eckpt``, and proof that they changed nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from emergency_ckpt.tools.cli.main import COMMANDS, USAGE_EXIT_CODE, Command, main

__all__ = ["USAGE_EXIT_CODE", "Tree", "add_command", "eckpt", "eckpt_here", "eckpt_json", "tree_of"]

Tree = dict[str, tuple[int, int, int, int, bytes | str]]


def tree_of(*roots: Path) -> Tree:
    """Every name below the roots: mode, inode, size, time of change, and the bytes or target."""
    found: Tree = {}
    for root in roots:
        for path in [root, *sorted(root.rglob("*"))]:
            status = path.lstat()
            data: bytes | str = ""
            if path.is_symlink():
                data = os.readlink(path)
            elif path.is_file():
                data = path.read_bytes()
            stamp = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
            found[str(path)] = (*stamp, data)
    return found


def eckpt(
    *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``eckpt`` in this process; return what a shell would have of it.

    ``env``: variables for its time. ``programs.eckpt`` is for what an import reads of them.
    """
    words, output, errors = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main(words)
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def eckpt_here(*words: object) -> int:
    """Run ``eckpt`` in this process, which may have put a fault there; return its exit status."""
    return main([*map(str, words)])


def add_command(
    monkeypatch: pytest.MonkeyPatch, module: str, *, takes_command: bool = False
) -> None:
    """Add the command ``toy``."""
    command = Command(module, "a toy", takes_command=takes_command)
    monkeypatch.setitem(COMMANDS, "toy", command)


def eckpt_json(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, Any]:
    """Run ``eckpt`` with ``--json``; return its exit status and the document."""
    done = eckpt(*arguments, "--json", env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
