"""Each example runs as it stands, is killed, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from ledgers import complete_in
from programs import printed, started
from readme_blocks import example_in

EXAMPLES = {"flax_train_state": 100, "grain_loader": 120, "orbax_plain": 400}
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
        pytest.param(name, marks=[] if name == "flax_train_state" else pytest.mark.slow)
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
