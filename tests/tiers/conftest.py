"""A ramdisk directory of its own for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers_support import open_tier

from emergency_ckpt.tiers.local.tier import LocalTier


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tier(ramdisk: Path) -> Iterator[LocalTier]:
    tier = open_tier(ramdisk)
    yield tier
    tier.close()
