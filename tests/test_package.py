"""The package as others install it: its version, and its types seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import emergency_ckpt

ROOT = Path(__file__).parents[1]
USER_PROGRAM = """
import jax
from jax.sharding import Mesh

import emergency_ckpt
from emergency_ckpt import CheckpointerConfig, EmergencyCheckpointer, Event, RestoreReport
from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import CheckpointError


def train(mesh: Mesh, state: dict[str, jax.Array]) -> RestoreReport | None:
    config = EmergencyCheckpointer.default_config().set(dir="/mnt/run", mesh=mesh)
    reveal_type(config)
    with config.instantiate() as checkpointer:
        reveal_type(checkpointer)
        try:
            checkpointer.save(step=1, state=state)
        except CheckpointError as error:
            print(error.problem)
    options = emergency.CheckpointManagerOptions()
    reveal_type(options)
    return None


def seen(event: Event, config: CheckpointerConfig) -> str:
    reveal_type(emergency_ckpt.__version__)
    return event.name


EmergencyCheckpointer.no_such_name
"""
REVEALED = [
    'Type of "config" is "CheckpointerConfig"',
    'Type of "checkpointer" is "EmergencyCheckpointer"',
    'Type of "options" is "CheckpointManagerOptions"',
    'Type of "emergency_ckpt.__version__" is "str"',
]


def test_version_of_package_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert emergency_ckpt.__version__ == project["version"]


def test_changelog_has_unreleased_changes_first() -> None:
    titles = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert titles[0] == "## [Unreleased]"


@pytest.mark.slow
def test_wheel_has_types_that_pyright_sees(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, ROOT], check=True
    )
    (wheel,) = wheels.glob("emergency_ckpt-*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    package = site / "emergency_ckpt"
    for name in ("py.typed", "_native.pyi", "tiers/FORMAT.md", "transfer/PROTOCOL.md"):
        assert (package / name).is_file(), name
    errors, revealed = pyright_on(tmp_path, site)
    assert errors == [
        'Cannot access attribute "no_such_name" for class "type[EmergencyCheckpointer]"'
    ]
    assert revealed == REVEALED


def pyright_on(directory: Path, site: Path) -> tuple[list[str], list[str]]:
    """Check the user's program strictly in ``directory``; return errors, and types revealed."""
    (directory / "program.py").write_text(USER_PROGRAM)
    settings = {
        "include": ["program.py"],
        "extraPaths": [str(site)],
        "typeCheckingMode": "strict",
        "reportUnusedExpression": False,
        "reportUnknownMemberType": False,
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each["message"].splitlines()[0] for each in found if each["severity"] == "error"]
    return errors, [each["message"] for each in found if each["severity"] == "information"]
