"""Each example runs as it stands, is killed, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import ast
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest
from ledgers import complete_in
from places import JOBS, ROOT
from programs import printed, started
from readme_blocks import example_in

EXAMPLES = {"flax_train_state": 100, "flax_nnx": 100, "grain_loader": 120, "orbax_plain": 400}
LONG_S = 120.0


def run(program: Path) -> tuple[str, str]:
    """Run to the end; return the step it began after, and its result."""
    output = printed(program, timeout_s=LONG_S)
    (began,) = re.findall(r"start after step (\w+)", output)
    (result,) = re.findall(r"done: (.+)", output)
    return began, result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("flax") else pytest.mark.slow)
        for name in EXAMPLES
    ],
)
def test_example_killed_resumes_bit_equal(ramdisk: Path, name: str) -> None:
    last_step = (r"last_step = 100\n", f"last_step = {EXAMPLES[name]}\n")
    began, wanted = run(example_in(ramdisk / "whole", name, last_step))
    assert began == "None"
    # A run that has ended is left in storage, since RAM is lost with its hosts.
    assert (ramdisk / "whole" / "persistent" / str(EXAMPLES[name])).is_dir()
    program = example_in(ramdisk / "killed", name, last_step)
    assert len(program.read_text().splitlines()) <= 60
    with started(program) as process:
        deadline_s = time.monotonic() + LONG_S
        while complete_in(ramdisk / "killed" / "ram") < 0:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    began, result = run(program)
    assert int(began) > 0
    assert result == wanted


IN_A_JOB = """
import runpy, sys
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job
initialize_job(JobEnvironment.from_environ())
runpy.run_path(sys.argv[1])
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("flax") else pytest.mark.slow)
        for name in EXAMPLES
    ],
)
def test_example_runs_in_several_processes(ramdisk: Path, name: str) -> None:
    program = example_in(ramdisk / "job", name)
    options = ("--slices", 2, "--hosts-per-slice", 1, "--max-restarts", 0)
    command = (sys.executable, "-c", IN_A_JOB, program)
    output = printed(JOBS / "eckpt_program.py", "launch", *options, "--", *command)
    assert len(re.findall("start after step None", output)) == 2
    assert len(set(re.findall(r"done: (.+)", output))) == 1
    assert (ramdisk / "job" / "persistent" / "100").is_dir()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=str)
def test_packages_of_examples_come_with_the_readmes_install(path: Path) -> None:
    assert "pip install '.[examples]'" in (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    names = {re.split(r"[^\w-]", each, maxsplit=1)[0].replace("-", "_") for each in listed}
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    roots = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    names |= {"orbax"} & {name.partition("_")[0] for name in names}  # of orbax-checkpoint
    assert roots - {"emergency_ckpt"} <= names
