"""Grain's iterators, any object with a state, and a nesting of them, over two lives of a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from iterator_lives import check, lives
from running_jobs import ByProgram, job_root

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found() -> Iterator[ByProgram]:
    with job_root() as root:
        yield lives(root, "grain")


def test_next_batch_is_that_of_the_undisturbed_run(found: ByProgram) -> None:
    check(found["grain_host_lost"], "local")


def test_so_it_is_from_storage(found: ByProgram) -> None:
    check(found["grain_ram_lost"], "persistent")
