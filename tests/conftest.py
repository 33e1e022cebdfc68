"""Tests that use JAX in this process see eight CPU devices; nothing else may configure it here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

# Before any backend exists; JAX raises otherwise, and then the order of imports is to be mended.
# By configuration and not by environment: processes that tests start choose for themselves.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# How long an example takes is the machine's affair: no test asserts a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


from checkpointer_support import World  # noqa: E402 - imports what JAX's configuration must precede

_LONG = {"multiprocess", "demo", "launch", "benchmarks", "testing"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole jobs first: a worker that gets one of those last would be alone for minutes."""
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


@pytest.fixture
def world() -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield World(root)
    shutil.rmtree(root)
