"""JAX's coordination service keeps the contract that the in-memory coordinators keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from coordination_suite import CHECKS
from running_jobs import job_root, run_life, spec_of

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    with job_root() as root:
        yield run_life(spec_of(root, "coordination_job.py", slices=request.param, hosts=1), root)


@pytest.mark.parametrize("name", CHECKS)
def test_jax(results: Results, name: str) -> None:
    assert [result[name] for result in results] == [{"value": "passed"}] * len(results)


def test_private_module_is_as_it_is_used(results: Results) -> None:
    for result in results:
        assert result["private_module"]["value"] == {
            "missing": [],
            "is_jax_error": True,
            "address": "127.0.0.1",
            "connected": "JaxCoordinator" if len(results) > 1 else "LocalCoordinator",
        }


def test_connections_do_not_see_each_other(results: Results) -> None:
    for result in results:
        assert result["namespaces"]["value"] == ["first"] * len(results)
