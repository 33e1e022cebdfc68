"""Who sends how much where during a persistent save: to storage, and to the other slices."""

from __future__ import annotations

from typing import Any

import pytest
from counting_proxy import URLS_VARIABLE, Way, ways_to
from fake_gcs import FakeGcs, bytes_received
from running_jobs import job_root, run_life, spec_of

SLICES, HOSTS = 2, 2
BIG_BYTES = 6 * 64 * 1024 * 4
CONTROL_BYTES = 64 << 10
"""JAX's coordination service lives in process 0; scribes get host states of some 100 bytes."""


def saved(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Way]]:
    """What the processes counted, and what came by their ways to storage."""
    with ways_to(gcs.url, SLICES * HOSTS) as ways, job_root() as root:
        monkeypatch.setenv(URLS_VARIABLE, " ".join(way.url for way in ways))
        spec = spec_of(root, "traffic_job.py", "save", slices=SLICES, hosts=HOSTS)
        results = run_life(spec, root)
    assert all("value" in result["save"] for result in results), results
    return [result["save"]["value"] for result in results], ways


def received(counts: list[Any], way: Way) -> int:
    """Bytes that came over any connection but those to storage."""
    return sum(count for (_, port), (_, count) in counts if port != way.port)


def check_nothing_crosses(counted: list[dict[str, Any]], ways: list[Way]) -> None:
    """No process gets more from others than what it takes to agree, in a save of 1.5 MiB."""
    for seen, way in zip(counted, ways, strict=True):
        # The count is one that would show it.
        assert received(seen["crossing"], way) >= seen["part_bytes"] * (len(counted) - 1)
        assert received(seen["saving"], way) < CONTROL_BYTES


def test_only_slice_0_talks_to_storage_and_nothing_crosses(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, ways = saved(gcs, monkeypatch)
    check_nothing_crosses(counted, ways)
    primary, others = ways[:HOSTS], ways[HOSTS:]
    assert [(way.connections, way.to_storage_bytes) for way in others] == [(0, 0)] * len(others)
    sent = [way.to_storage_bytes for way in primary]
    assert min(sent) > BIG_BYTES * 2 / HOSTS * 0.9  # two saves
    # Nobody had another way: the server has not received more than came by these.
    assert 2 * BIG_BYTES <= bytes_received(gcs.requests()) <= sum(sent)
