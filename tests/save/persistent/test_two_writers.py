"""Two lives that save in one directory at once: what was saved is there, and one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from persistent_steps import KEPT, POINTS
from programs import printed_beside_bucket
from two_writers_program import ACTS, OTHER, STEP, outcomes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["disk", "bucket"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "bucket":
        return printed_beside_bucket("two_writers_program.py", "gs://bucket/run")
    directory: Path = tmp_path_factory.mktemp("runs")
    return json.loads(json.dumps(outcomes(str(directory))))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("act", ACTS)
def test_life_that_wakes_up_in_a_save_spoils_nothing(seen: Any, point: str, act: str) -> None:
    found = seen[f"{point} {act}"]
    errors, ours = found["errors"], dict(found["ours"])
    if act == "twin":
        assert "has the same number" in errors["newer"], "who was there first goes on"
        assert (errors["older"], errors["next"]) == ("", "")
        assert ours == {2: 2, STEP: STEP}
        return
    assert errors["newer"] == ""
    # Of its place that another has taken, of its files, or of the log.
    assert bool(errors["older"]) == (point != "published")
    assert errors["next"].startswith("DirectoryInUse: ")
    counts = point in ("marked", "published")  # with both its markers it was whole
    expected = {2: 2} | ({STEP: STEP} if counts else {})
    if act == "same_step":
        expected |= {STEP: 10 * STEP}
    else:
        count = KEPT if act == "many_steps" else 1
        expected |= {step: step for step in range(OTHER, OTHER + count)}
    assert ours == expected
    then = found["then"]
    assert dict(then["ours"]) == expected
    assert then["plain"] == sorted(expected)
