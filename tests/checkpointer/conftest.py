"""Checkpointers that a test has dropped end by themselves: before their ramdisk is removed."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

from emergency_ckpt import checkpointer
from emergency_ckpt.cluster.preemption import OwnNotices

LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def no_handler_is_left() -> Iterator[None]:
    """A dropped checkpointer ends in a thread; only the main thread can set SIGTERM's handler."""
    yield
    wait_for_dropped()
    OwnNotices().close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
