"""The leader's part of a restore at some size: what it reads, and what it need not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.cell import lead
from benchmarks.scale.job import Cell, build


@pytest.mark.parametrize(
    ("placement", "lost", "manifests"),
    [
        ("all_but_primary", "nothing", 0),
        ("all_but_primary", "slice", 0),
        ("striped(2)", "nothing", 9),
        ("striped(2)", "host", 8),
    ],
)
def test_leader_reads_manifests_of_striped_copies_alone(
    tmp_path: Path, placement: str, lost: str, manifests: int
) -> None:
    """Where each process needs what another has, what the processes report suffices."""
    cell = Cell(3, 3, 12, placement, lost)
    assert lead(cell, build(tmp_path, cell))["manifests_read"] == manifests
