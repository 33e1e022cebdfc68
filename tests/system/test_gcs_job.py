"""Jobs of four real processes whose persistent tier is a bucket of the fake server."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_gcs import FakeGcs
from programs import seen_by_plain_orbax
from running_jobs import job_root, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

METADATA_BYTES = 160_000  # directories, markers, checksums, documents, nodes of the database


def run(root: Path, life: int, slices: int, *programs: str) -> list[dict[str, Any]]:
    spec = spec_of(root, "gcs_job.py", *programs, slices=slices, hosts=4 // slices)
    results = run_life(spec, root, life=life)
    shutil.rmtree(root / "run", ignore_errors=True)  # all RAM is lost between lives
    return results


def values(results: list[dict[str, Any]], program: str) -> list[Any]:
    assert all("value" in result[program] for result in results), results
    return [result[program]["value"] for result in results]


def check_no_byte_twice(ranges: list[list[str]]) -> None:
    by_object: dict[str, list[tuple[int, int]]] = {}
    for target, header in ranges:
        first, last = header.removeprefix("bytes=").split("-")
        by_object.setdefault(target, []).append((int(first), int(last)))
    for target, spans in by_object.items():
        spans.sort()
        for (_, last), (first, _) in pairwise(spans):
            assert first > last, f"bytes {first}-{last} of {target} were read twice"


@pytest.mark.parametrize("slices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_each_byte_is_written_by_slice_0_and_read_once(gcs: FakeGcs, slices: int) -> None:
    with job_root() as root:
        # The other slices have no way to storage here: they need none.
        program = "save_only_primary"
        for seen in values(run(root, 0, slices, program), program):
            assert seen == [5]
        # One layout, whatever the number of slices.
        read = seen_by_plain_orbax("gs://bucket/run", 5)
        assert (read["steps"], read["manager"], read["checkpointer"]) == ([5], True, True)
        assert read["count"] == 5
        assert "keys" in read["leaves"]
        results = values(run(root, 1, slices, "restore_then_from_ram"), "restore_then_from_ram")
    first, second = [pair[0] for pair in results], [pair[1] for pair in results]
    for seen in first:
        assert (seen["step"], seen["tier"], seen["wrong"]) == (5, "persistent", [])
        assert seen["iterator_right"]
    size_bytes = first[0]["state_bytes"]
    served = first[0]["served"]
    assert size_bytes <= served <= size_bytes + METADATA_BYTES
    check_no_byte_twice(first[0]["ranges"])
    shares = [seen["persistent"] for seen in first]
    # Evenly, as far as whole chunks go: the largest is a leaf's part on one device.
    chunk_bytes = 128 * 1024 * 4 * slices // 4
    assert max(shares) <= sum(shares) / 4 + chunk_bytes
    for seen in second:
        assert (seen["step"], seen["tier"], seen["wrong"]) == (5, "local", [])
        assert (seen["persistent"], seen["peer"]) == (0, 0)
