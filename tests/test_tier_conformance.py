"""Every tier does what ``tier.Tier`` says: the same cases for each (``tier_cases``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import printed_beside_bucket
from tier_cases import CASES, Place
from tier_places import MemoryPlace, RamPlace, StoragePlace


@pytest.fixture(params=["ram", "disk", "memory"])
def place(request: pytest.FixtureRequest, ramdisk: Path, tmp_path: Path) -> Iterator[Place]:
    made = {
        "ram": lambda: RamPlace(ramdisk),
        "disk": lambda: StoragePlace(str(tmp_path / "steps")),
        "memory": MemoryPlace,
    }[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_tier(place: Place, case: Callable[[Place], None]) -> None:
    case(place)


def test_tier_in_a_bucket() -> None:
    found = printed_beside_bucket("tier_places.py")
    assert {name for name, problem in found.items() if problem} == set(), found
    assert len(found) == len(CASES)
