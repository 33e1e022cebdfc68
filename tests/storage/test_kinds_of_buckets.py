"""Buckets that are not what they seem: zonal ones are refused, hierarchical ones work."""

from __future__ import annotations

import json

import pytest
from fake_gcs import FakeGcs
from places import JOBS
from programs import printed

pytestmark = pytest.mark.timeout(600)


def test_zonal_bucket_is_refused_at_its_first_use() -> None:
    with FakeGcs(buckets=["zonal", "hierarchical", "bucket"]) as gcs:
        told = printed(JOBS / "bucket_kinds_program.py", env=gcs.environment(), timeout_s=500)
        written = gcs.object_names("zonal", "")
    found = json.loads(told.splitlines()[-1])
    zonal = found.pop("zonal")
    for call in ("create", "list", "life"):
        assert "bucket 'zonal' is zonal (Rapid)" in zonal[call], zonal
        assert "use a regional or multi-region bucket" in zonal[call], zonal
    assert written == []
    for kind, seen in found.items():
        assert seen == {"create": "", "list": "", "life": "", "steps": [4]}, kind
