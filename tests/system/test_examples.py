"""Each example runs as it stands, is killed, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledgers import complete_in
from readme_blocks import ROOT

EXAMPLES = {"flax_train_state": 100, "grain_loader": 120, "orbax_plain": 400}
LONG_S = 120.0


def program_in(directory: Path, name: str, last_step: int) -> Path:
    """Return the example, with directories of its own and another last step."""
    directory.mkdir()
    lines = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    assert len(lines.splitlines()) <= 60
    for old, new in (
        (r'"/mnt/checkpoints/\w+"', repr(str(directory / "persistent"))),
        (r'"/dev/shm/eckpt"', repr(str(directory / "ram"))),
        (r"last_step = 100\n", f"last_step = {last_step}\n"),
    ):
        lines, count = re.subn(old, new, lines)
        assert count == 1
    path = directory / "train.py"
    path.write_text(lines)
    return path


def start(program: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )


def run(program: Path) -> tuple[str, str]:
    """Run to the end; return the step it began after, and its result."""
    with start(program) as process:
        output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0
    (began,) = re.findall(r"start after step (\w+)", output)
    (result,) = re.findall(r"done: (.+)", output)
    return began, result


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_killed_resumes_bit_equal(ramdisk: Path, name: str) -> None:
    began, wanted = run(program_in(ramdisk / "whole", name, EXAMPLES[name]))
    assert began == "None"
    program = program_in(ramdisk / "killed", name, EXAMPLES[name])
    with start(program) as process:
        deadline_s = time.monotonic() + LONG_S
        while complete_in(ramdisk / "killed" / "ram") < 0:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.kill()
    began, result = run(program)
    assert int(began) > 0
    assert result == wanted
