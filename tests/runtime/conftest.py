"""Makes the conformance suite, which processes of another directory run too, importable."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
