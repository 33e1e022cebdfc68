"""The tutorials of the site, run as a reader would, with directories of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import printed
from readme_blocks import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tutorial-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_commands_of_the_first_job_end_with_equal_numbers(root: Path) -> None:
    text = (TUTORIALS / "first_job.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    commands = "".join(block for block in blocks if "pip install" not in block)
    for place, own in (("/tmp/run7", "run7"), ("/tmp/train.py", "train.py")):
        assert place in commands
        commands = commands.replace(place, str(root / own))
    # The program has the ramdisk's directory in its own text.
    commands = commands.replace("s#last_step", f"s#/dev/shm/eckpt#{root}/ram#; s#last_step")
    commands = commands.replace(" /dev/shm/eckpt ", f" {root}/ram ").replace("20000", "2000")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.run(
        ["bash", "-c", f"set -e -o pipefail\n{commands}".replace("timeout", "! timeout")],
        cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-4000:]
    results = re.findall(r"^done: (.*)$", job.stdout, re.M)
    assert len(results) >= 2
    assert len(set(results)) == 1
    assert re.search(r"^2000 +storage .*whole$", job.stdout, re.M)


def test_notebook_of_a_lost_slice_holds_its_asserts() -> None:
    cells = json.loads((TUTORIALS / "lose_a_slice.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(text.count("assert ") for text in code) >= 3
    text = printed("-c", "\n".join([*code, "import shutil", "shutil.rmtree(WORK)"]))
    assert re.search(r"slice 1: 0 bytes from its own RAM, [1-9]\d* from peers", text)
