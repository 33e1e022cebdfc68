"""The package without its extras: a local directory needs neither a client of a bucket nor rich."""

from __future__ import annotations

import importlib.util
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from places import ROOT
from programs import ended

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.storage.directory import StorageDirectory

ABSENT = ("gcsfs", "google.auth", "google.cloud", "rich")
PROGRAM = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))  # an import of it finds no module
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.tools.cli.main import main
places = {"dir": sys.argv[2] + "/stored", "local_dir": sys.argv[2] + "/ram"}
for last in (2, 4):
    with EmergencyCheckpointer(**places, local_save_every=1, save_every=2) as ckpt:
        step, state = ckpt.restore(state={"w": jnp.zeros(4)})
        for step in range((step or 0) + 1, last + 1):
            ckpt.save(step=step, state={"w": jnp.full(4, float(step))})
print("restored", ckpt.last_restore.step if ckpt.last_restore else None)
words = [word for name, place in places.items() for word in ("--" + name.replace("_", "-"), place)]
assert main(["ls", *words]) == 0
assert main(["doctor", *words]) in (0, 1)
"""


def test_local_directory_needs_no_extra(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = ended(program, ",".join(ABSENT), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "restored 2" in done.stdout
    assert "whole" in done.stdout


def test_bucket_without_its_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def absent(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "gcsfs" else find_spec(name, package)

    monkeypatch.setattr("emergency_ckpt.storage.directory.find_spec", absent)
    with pytest.raises(ConfigError, match=r"emergency-ckpt\[gcs\]"):
        StorageDirectory("gs://bucket/run", 5.0)
    StorageDirectory("/tmp/run", 5.0)


def test_required_packages_are_a_dozen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 13
