"""Checkpointers that a test has dropped end by themselves: before their ramdisk is removed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from emergency_ckpt import checkpointer

LONG_S = 60.0


@pytest.fixture(autouse=True)
def dropped_checkpointers_end(ramdisk: Path) -> Iterator[None]:
    del ramdisk  # this fixture ends first
    yield
    gc.collect()
    if any(thread.name == "eckpt-final" for thread in threading.enumerate()):
        assert checkpointer._final_calls.wait(LONG_S)
