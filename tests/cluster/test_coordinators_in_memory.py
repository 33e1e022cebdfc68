"""The coordinator of a one-process job and the one for tests keep the contract of JAX's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from coordination_suite import CHECKS
from memory_coordination import MemoryService

from emergency_ckpt.cluster.coordination import LocalCoordinator, connect, deadline_left_s


@pytest.mark.parametrize("name", CHECKS)
def test_local(name: str) -> None:
    CHECKS[name](LocalCoordinator())


@pytest.mark.parametrize("process_count", [1, 2, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_memory(name: str, process_count: int) -> None:
    service = MemoryService(process_count)
    with ThreadPoolExecutor(process_count) as pool:
        list(pool.map(lambda p: CHECKS[name](service.member(p)), range(process_count)))


def test_alone_there_is_nobody_to_coordinate_with() -> None:
    assert jax.process_count() == 1
    first, second = connect("run"), connect("run")
    first.put("key", b"")
    second.put("key", b"")


def test_deadline_that_has_passed_leaves_a_moment() -> None:
    assert deadline_left_s(0.0) == 0.001
