"""A private module that is gone is an error that names the project, its version and the range."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from emergency_ckpt.errors import MissingDependency
from emergency_ckpt.private_names import private_module

WITHOUT = """
import jax
from jax._src import distributed
del distributed.global_state  # as where a later JAX has renamed it
import emergency_ckpt.checkpointer
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [("jax._src.no_such_module", "x"), ("jax._src.distributed", "no_such_name")],
)
def test_private_name_that_is_gone_names_version_and_range(module: str, name: str) -> None:
    with pytest.raises(MissingDependency, match=r"jax.*<0\.13") as caught:
        private_module(module, name, project="jax")
    assert caught.value.target == module
    assert caught.value.actual == f"jax {metadata.version('jax')}"


def test_project_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingDependency, match="got no no-such-project"):
        private_module("no_such_project._x", project="no-such-project")


def test_range_of_an_extra_is_named() -> None:
    with pytest.raises(MissingDependency, match=r"expected ray.*<3.*pip install 'ray"):
        private_module("ray._no_such_module", project="ray")


def test_checkpointer_without_jax_client_fails_at_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    start = "emergency_ckpt.errors.MissingDependency: import jax._src.distributed"
    (told,) = [line for line in done.stderr.splitlines() if line.startswith(start)]
    assert "jax<0.13,>=0.10.2" in told
