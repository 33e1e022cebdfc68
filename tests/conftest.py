"""Tests that use JAX in this process see eight CPU devices; nothing else may configure it here."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# Before any backend exists; JAX raises otherwise, and then the order of imports is to be mended.
# By configuration and not by environment: processes that tests start choose for themselves.
# `make test-device` gives an empty platform: JAX takes what is there.
jax.config.update("jax_platforms", os.environ.get("EMERGENCY_CKPT_TEST_PLATFORM", "cpu") or None)
jax.config.update("jax_num_cpu_devices", 8)

# How long an example takes is the machine's affair: no test asserts a time. Without an explanation,
# which traces each line of each example, a failure is made small before the test's time is up.
# `make test` runs "quick", and `make test-all` the rest of the examples.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=30)
settings.load_profile("untimed")


# Test modules are imported by their paths, so that folders may have the names of packages.
_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT / name) for name in ("tests/support", "verification", "tests/jobs")]
# Programs that tests start find the same support, among it the server of a bucket.
_GIVEN = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
# A worker has them from the process that started it.
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path[:2], *_GIVEN]))

# ruff: noqa: E402 - these import what the lines above must precede
import warm_start
from fake_gcs import FakeGcs
from file_costs import Cost, FileCosts, read_costs
from places import AXLEARN_DOUBLE
from process_starts import way_to_a_start
from tiers_support import close_tiers, open_tier
from world import World

from emergency_ckpt.cluster import membership
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.run_secret import generate_secret

# A start without a secret makes one up and stretches it, which takes as long as all else in most
# tests: the starts of this process share one.
vars(membership).update(generate_secret=functools.cache(generate_secret))

warm_start.offer()
warm_start.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-costs",
        choices=("print", "write"),
        help="print what each test file cost, and what grew; write: keep it in durations.json",
    )
    parser.addoption(
        "--most-cpu-s",
        type=float,
        default=2.0,
        help="fail a test that starts no process, and is not marked dear, above this",
    )


def pytest_configure(config: pytest.Config) -> None:
    shows, most_cpu_s = config.getoption("--file-costs"), config.getoption("--most-cpu-s")
    config.pluginmanager.register(FileCosts(shows, most_cpu_s))


# First, since the selection by marks reads what it gives.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes. The dearest files come first, so that no worker ends with one."""
    for item in items:
        function = getattr(item, "originalname", item.name)
        if way_to_a_start(item.path, [function, *getattr(item, "fixturenames", ())]) is not None:
            item.add_marker("process")
        if item.path.parent.name == "system" and item.get_closest_marker("timeout") is None:
            # A program that hangs is ended after 300 s, and the job is started again.
            item.add_marker(pytest.mark.timeout(900))
    before = read_costs()
    dearest = max(before.values(), key=lambda cost: cost.wall_s, default=Cost())

    def place(item: pytest.Item) -> tuple[float, bool]:
        in_process = item.get_closest_marker("process") is None
        return -before.get(_path(item), dearest).wall_s, in_process

    items.sort(key=place)


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(_ROOT).as_posix()


@pytest.fixture(scope="session", autouse=True)
def tables_of_unicode() -> None:
    """Hypothesis makes them once in a checkout: seconds, which are not those of a test."""
    st.text().validate()


@pytest.fixture
def world() -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield World(root)
    shutil.rmtree(root)


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    """A directory on tmpfs, of one test; tiers that are still open at its end are closed."""
    path = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield path
    close_tiers()
    shutil.rmtree(path)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """A server with an empty bucket ``bucket``, which programs find by their environment."""
    with FakeGcs(buckets=["bucket"]) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def tier(ramdisk: Path) -> LocalTier:
    return open_tier(ramdisk)


@pytest.fixture
def axlearn_face(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, beside the double of axlearn, which is not among the installed packages."""
    monkeypatch.syspath_prepend(AXLEARN_DOUBLE)
    before = set(sys.modules)
    yield importlib.import_module("emergency_ckpt.axlearn")
    for name in set(sys.modules) - before:
        if name.startswith(("axlearn", "emergency_ckpt.axlearn")):
            del sys.modules[name]
