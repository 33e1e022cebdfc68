"""What the programs of a real job told, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, run_life, spec_of

Results = list[dict[str, Any]]
"""The outcome of each program, by process."""


def results_of(program: str, **shape: int) -> Any:
    """A fixture of a module: one life of a job of ``program``, a file in ``tests/jobs``."""

    @pytest.fixture(scope="module")
    def results() -> Iterator[Results]:
        with job_root() as root:
            yield run_life(spec_of(root, program, **shape), root)

    return results
