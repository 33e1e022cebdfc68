"""Two lives of ``iterators_job``: train, lose a host with its RAM, go on with other numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from running_jobs import ByProgram, renumbered, run_life, spec_of


def lives(root: Path, name: str) -> ByProgram:
    """What each process of the second life found, after a lost host and after all RAM was lost."""
    first = run_life(spec_of(root, "iterators_job.py", f"{name}_train"), root)
    for result in first:
        assert "value" in result[f"{name}_train"], first
    programs = f"{name}_host_lost", f"{name}_ram_lost"
    spec = spec_of(root, "iterators_job.py", *programs)
    shutil.rmtree(spec.ramdisk(1) / f"{name}-kept")
    order = renumbered([3, 2, 1, 0])
    second = run_life(spec, root, life=1, host_of_process=order)
    return ByProgram(second)


def check(found: list[Any], tier: str) -> None:
    """Every process goes on with the batch that the undisturbed run has next."""
    assert len(found) == 4
    for seen in found:
        assert (seen["step"], seen["tier"], seen["state"], seen["epoch"]) == (12, tier, 12.0, 12)
        assert seen["in_place"]
        assert seen["next"] == seen["undisturbed"]
    assert len({str(seen["next"]) for seen in found}) == 4, "each process has data of its own"
