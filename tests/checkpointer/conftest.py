"""Checkpointers that a test has dropped end by themselves: before their ramdisk is removed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

from emergency_ckpt import checkpointer

LONG_S = 60.0


@pytest.fixture
def world(world: World) -> Iterator[World]:
    yield world
    wait_for_dropped()


@pytest.fixture
def ramdisk(ramdisk: Path) -> Iterator[Path]:
    yield ramdisk
    wait_for_dropped()


def wait_for_dropped() -> None:
    gc.collect()
    if any(thread.name == "eckpt-final" for thread in threading.enumerate()):
        assert checkpointer._final_calls.wait(LONG_S)
