"""The package as others install it: its version, and its types seen from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
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


SETTINGS_PROGRAM = """
from pathlib import Path

import jax
from emergency_ckpt import EmergencyCheckpointer

config = EmergencyCheckpointer.default_config()
config.set(dir=Path("/mnt/run"), placement="striped(2)")
EmergencyCheckpointer(local_dirr="/dev/shm/eckpt")
config.set(typo=3, local_save_every="ten")
config.set(local_save_every="ten")
with EmergencyCheckpointer(config, local_dir="/dev/shm/eckpt") as checkpointer:
    step, state = checkpointer.restore(state={"w": jax.numpy.zeros(3)})
    reveal_type(step)
    reveal_type(state)
"""


@pytest.mark.slow  # half a minute of pyright
def test_settings_and_state_are_typed(tmp_path: Path) -> None:
    errors, revealed = pyright_on(tmp_path, ROOT, SETTINGS_PROGRAM)
    assert errors[:2] == ['No parameter named "local_dirr"', 'No parameter named "typo"']
    assert len(errors) == 3
    assert '"local_save_every"' in errors[2]
    assert revealed == [
        'Type of "step" is "int | None"',
        'Type of "state" is "dict[str, Array]"',
    ]


def test_dir_of_package_shows_the_public_names() -> None:
    assert set(emergency_ckpt.__all__) <= set(dir(emergency_ckpt))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that deploy/Dockerfile builds too."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(*ignored_by_the_image())
    shutil.copytree(ROOT, source, ignore=left_out, dirs_exist_ok=True)
    build = ROOT / "deploy" / "image" / "build_wheel.sh"
    subprocess.run([build, source, out], env={**os.environ, "PYTHON": sys.executable}, check=True)
    return out


def ignored_by_the_image() -> list[str]:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    return [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
def test_wheel_has_types_that_pyright_sees(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (wheel,) = dist.glob("emergency_ckpt-*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    package = site / "emergency_ckpt"
    for name in ("py.typed", "_native.pyi", "FORMAT.md", "ram/FORMAT.md", "transfer/PROTOCOL.md"):
        assert (package / name).is_file(), name
    errors, revealed = pyright_on(tmp_path, site)
    assert errors == [
        'Cannot access attribute "no_such_name" for class "type[EmergencyCheckpointer]"'
    ]
    assert revealed == REVEALED


SAVE_AND_RESTORE = """
import os, sys
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer
local_dir, directory = sys.argv[1:]
config = EmergencyCheckpointer.default_config().set(dir=directory, local_dir=local_dir)
with config.instantiate() as checkpointer:
    step, state = checkpointer.restore(state={"w": jnp.zeros(1000)})
    print(step, float(state["w"][7]))
    if step is None:
        checkpointer.save(step=3, state={"w": jnp.arange(1000.0)}, force=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_package_saves_and_restores(
    kind: str, dist: Path, tmp_path: Path, ramdisk: Path
) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    alone = {
        "PATH": f"{place}/bin:{tmp_path}/tools",
        "HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "PYTHON": str(python),
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }
    if kind == "wheel":
        (tmp_path / "tools").mkdir()
        (tmp_path / "tools" / "sh").symlink_to("/bin/sh")
        assert not any(shutil.which(name, path=alone["PATH"]) for name in ("cc", "g++", "clang"))
        scripts, lock = ROOT / "deploy" / "image", tmp_path / "packages.lock"
        install = ["sh", str(scripts / "install.sh"), str(dist), str(lock)]
        refused = subprocess.run(install, env=alone, capture_output=True, text=True, check=False)
        assert "lock.sh writes it" in refused.stderr
        version = "{}.{}".format(*sys.version_info)
        locked = {**os.environ, "PYTHON": sys.executable, "PYTHON_VERSION": version}
        subprocess.run([scripts / "lock.sh", ROOT, lock, "jax"], env=locked, check=True)
        subprocess.run(install, env=alone, check=True)
    else:
        (sdist,) = dist.glob("emergency_ckpt-*.tar.gz")
        subprocess.run([python, "-m", "pip", "install", "-q", sdist], check=True)
    for wanted in ("None 0.0", "3 7.0"):
        places = [str(ramdisk / "ram"), str(tmp_path / "storage")]
        done = subprocess.run(
            [python, "-I", "-c", SAVE_AND_RESTORE, *places],
            env=alone,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == wanted
    health = re.search(r"^HEALTHCHECK .*CMD (\[.+\])$", dockerfile(), re.M)
    assert health is not None
    command = json.loads(health[1])
    subprocess.run([place / "bin" / command[0], *command[1:]], env=alone, check=True)


@pytest.mark.slow
def test_wheel_is_for_every_linux_of_its_glibc(dist: Path) -> None:
    (wheel,) = dist.glob("emergency_ckpt-*.whl")
    tags = wheel.stem.rpartition("-")[2].split(".")
    assert any(re.fullmatch(r"manylinux_2_[0-9]+_\w+", tag) for tag in tags), wheel.name


def dockerfile() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text()


def pyright_on(
    directory: Path, site: Path, program: str = USER_PROGRAM
) -> tuple[list[str], list[str]]:
    """Check the user's program strictly in ``directory``; return errors, and types revealed."""
    (directory / "program.py").write_text(program)
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
