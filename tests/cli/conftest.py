"""The run whose RAM the tests of ``eckpt drain`` save."""

from __future__ import annotations

import pytest
from drains import Drains
from world import World


@pytest.fixture
def drains(world: World, capsys: pytest.CaptureFixture[str]) -> Drains:
    return Drains(world, capsys)
