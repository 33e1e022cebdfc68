"""A connection that breaks, or a peer that says nothing for a while, costs no step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import check_whole, job_root, of, run_life, spec_of


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "unsteady_job.py"), root)


@pytest.mark.parametrize("program", ["resets", "silence"])
def test_restore_over_unsteady_connections_has_the_newest_step(
    results: list[dict[str, Any]], program: str
) -> None:
    seen = of(results, program)
    check_whole(seen, 10)
    assert [s["quarantined"] for s in seen] == [[]] * 4
    assert [s["rejected"] for s in seen] == [[]] * 4


def test_restore_without_its_holder_fails_and_loses_nothing(
    results: list[dict[str, Any]],
) -> None:
    refused, again = zip(*of(results, "refusal"), strict=True)
    for seen in refused:
        assert seen.get("error") == "HolderUnreachable", seen
        assert "process/0" in seen["text"] or "process/1" in seen["text"]
        assert "restore again" in seen["text"]
    check_whole(list(again), 10)


def test_load_over_unsteady_connections_is_done_once(results: list[dict[str, Any]]) -> None:
    seen = of(results, "loaded")
    check_whole(seen, 10, "persistent")
    assert [s["loads"] for s in seen] == [[10]] * 4
