"""A job of three slices; jobs of one process are in ``checkpointer``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from restarts import new_world, train_and_kill
from running_jobs import job_root, of, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

WHOLE = 2634  # bytes of the state, which every host of a slice of one host holds
LOST = {
    "everything_kept": (),
    "a_slice_lost": (1,),
    "two_slices_lost": (0, 1),
}


@pytest.fixture(scope="module")
def three() -> Iterator[list[dict[str, Any]]]:
    """Three slices of one host: slice 0 stores nothing in RAM, 1 and 2 everything."""
    with job_root() as root:
        train_and_kill(spec_of(root, "lives_job.py", "train", slices=3, hosts=1), victims=(0,))
        spec = spec_of(root, "lives_job.py", *LOST, slices=3, hosts=1)
        for name, hosts in LOST.items():
            new_world(spec, name, range(3), hosts)
        yield run_life(spec, root, life=1)


@pytest.mark.parametrize(
    ("program", "empty"),
    [("everything_kept", [0]), ("a_slice_lost", [0, 1]), ("two_slices_lost", [0, 1])],
)
def test_three_slices(three: list[dict[str, Any]], program: str, empty: list[int]) -> None:
    seen = of(three, program)
    for process, found in enumerate(seen):
        own = 0 if process in empty else WHOLE
        assert found == {
            "step": 10,
            "tier": "local",
            "differences": [],
            "iterator": [process, 1000 + process],
            "local": own,
            "peer": WHOLE - own,
        }
