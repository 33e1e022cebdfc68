"""A state of 20,000 leaves, on two real processes: ``many_leaves_job.py``."""

from __future__ import annotations

from typing import Any

import pytest
from job_results import Results, results_of
from running_jobs import of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


results = results_of("many_leaves_job.py", slices=2, hosts=1, devices=2)


def whole(tier: str, *, from_peers: bool) -> dict[str, Any]:
    return {"step": 3, "tier": tier, "from_peers": from_peers, "differences": []}


def test_lost_host_fetches_20_000_leaves(results: Results) -> None:
    first, second = of(results, "host_lost")
    assert first == whole("local", from_peers=False)
    assert second == whole("local", from_peers=True)


def test_20_000_leaves_come_back_from_storage(results: Results) -> None:
    for process in of(results, "all_ram_lost"):
        assert process == whole("persistent", from_peers=process["from_peers"])
