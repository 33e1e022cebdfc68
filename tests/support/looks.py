"""Runs of ``eckpt``, and proof that they changed nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emergency_ckpt.tools.cli.main import COMMANDS, RUN, USAGE_EXIT_CODE, Command, main

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
    """Run ``eckpt`` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "emergency_ckpt.tools.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def eckpt_here(*words: object) -> int:
    """Run ``eckpt`` in this process, which may have put a fault there; return its exit status."""
    return main([*map(str, words)])


def add_command(
    monkeypatch: pytest.MonkeyPatch, module: str, *, takes_command: bool = False
) -> None:
    """Add the command ``toy``, which needs the extra ``demo``."""
    command = Command(module, "a toy", RUN, "demo", takes_command=takes_command)
    monkeypatch.setitem(COMMANDS, "toy", command)


def eckpt_json(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, Any]:
    """Run ``eckpt`` with ``--json``; return its exit status and the document."""
    done = eckpt(*arguments, "--json", env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
