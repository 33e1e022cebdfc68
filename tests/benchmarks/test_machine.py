"""The facts that figures are published with."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.common import machine


def _git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(directory), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout_says_whether_it_was_changed(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-q", "-m", "one")
    head = _git(tmp_path, "rev-parse", "--short", "HEAD")
    assert machine.commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert machine.commit(tmp_path) == f"{head} with changes"


def test_commit_without_a_checkout_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit(tmp_path) is None
