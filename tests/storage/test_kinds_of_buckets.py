"""Buckets that are not what they seem: zonal ones are refused, hierarchical ones work."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any
from urllib.request import urlopen

import pytest
from fake_gcs import FakeGcs
from places import JOBS
from programs import printed

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    """What the program saw, and the names of each bucket afterwards, folders included."""
    with FakeGcs(buckets=["zonal", "hierarchical", "bucket"]) as gcs:
        env = {**gcs.environment(), "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "true"}
        told = printed(JOBS / "bucket_kinds_program.py", env=env, timeout_s=500)
        found = json.loads(told.splitlines()[-1])
        for kind, seen in found.items():
            seen["objects"] = gcs.object_names(kind)
        with urlopen(f"{gcs.url}/storage/v1/b/hierarchical/folders") as reply:
            found["hierarchical"]["folders"] = [x["name"] for x in json.load(reply)["items"]]
    return found


def test_zonal_bucket_is_refused_at_its_first_use(kinds: dict[str, Any]) -> None:
    zonal = kinds["zonal"]
    for call in ("create", "list", "life"):
        assert "bucket 'zonal' is zonal (Rapid)" in zonal[call], zonal
        assert "use a regional or multi-region bucket" in zonal[call], zonal
    assert zonal["objects"] == []


@pytest.mark.parametrize("kind", ["hierarchical", "bucket"])
def test_lives_in_other_kinds_of_buckets_see_their_steps_alone(
    kind: str, kinds: dict[str, Any]
) -> None:
    seen = kinds[kind]
    assert [seen[call] for call in ("create", "list", "life")] == [""] * 3
    assert seen["step"] == 4
    assert seen["all"] == [4]
    assert seen["passed over"] == []
    assert seen["unusable"] == []
    removed = [name for name in seen["objects"] if name.startswith(("run/2/", "run/4/"))]
    assert removed == []


def test_removed_step_leaves_no_folder(kinds: dict[str, Any]) -> None:
    """A hierarchical bucket keeps the folder of objects that were deleted."""
    seen = kinds["hierarchical"]
    above = {str(parent) for name in seen["objects"] for parent in PurePosixPath(name).parents}
    assert {name.rstrip("/") for name in seen["folders"]} == above - {"."}
