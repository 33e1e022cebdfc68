"""A process killed while it saves a step over another life's leaves the old one, or the new."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from persistent_steps import complete_steps, life, save_over, value_of
from places import JOBS
from programs import ended

from emergency_ckpt.storage import PersistentTier

PROGRAM = JOBS / "replacement_program.py"
CLAIM, PUBLISHED, SETTLED = (f"log/{number:012d}.json" for number in (4, 5, 6))
"""The versions that the save writes: those of the first life are 1 to 3."""


@pytest.mark.parametrize(
    ("event", "end", "value"),
    [
        ("os.link", CLAIM, 4),
        ("os.rename", f"4.rolled-back-{life(1)}", 4),  # nothing has been moved
        ("open", "process_00000_of_00001.json.tmp", 4),  # both folders have
        ("open", "checksums.json.tmp", 4),  # the new tensors are whole
        ("os.link", "4/marker.json", 4),
        ("os.link", PUBLISHED, 4),  # all files are there
        ("os.link", SETTLED, 40),
    ],
)
def test_step_replaced_by_a_killed_process_is_there(
    tmp_path: Path, event: str, end: str, value: int
) -> None:
    directory = tmp_path / "steps"
    save_over(PersistentTier(str(directory)), 2, 2, life(1))
    save_over(PersistentTier(str(directory)), 4, 4, life(1))
    assert ended(PROGRAM, directory, event, end, timeout_s=250).returncode == -signal.SIGKILL
    tier = PersistentTier(str(directory))
    assert complete_steps(tier) == [2, 4]
    assert value_of(tier, 4) == value
    save_over(tier, 4, 41, life(3))
    assert value_of(PersistentTier(str(directory)), 4) == 41
    assert complete_steps(tier) == [2, 4]
    table = tier.found.log.read().table
    assert table is not None
    assert not any(entry.pending for entry in table.steps)
