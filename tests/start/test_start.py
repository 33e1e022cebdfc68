"""The start of a job's life, and what comes to rest between processes, over threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.peers import Known, agree_start, start_told
from emergency_ckpt.cluster.process_placement import place_process, topology_of
from emergency_ckpt.config import Config
from emergency_ckpt.core.placement import Topology
from emergency_ckpt.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidState,
    PersistentTierError,
    RamdiskFull,
    RestoreFailed,
)
from emergency_ckpt.state import describe
from emergency_ckpt.types import SaveId

LONG_S = 60.0


Start = Callable[[], tuple[str, Known]]


def start(count: int, starts: dict[int, Start], stored: Callable[[], Known] = Known) -> list[Any]:
    service = MemoryService(count)
    return everywhere(
        count,
        lambda p: agree_start(
            service.member(p), starts.get(p, lambda: ("a:1", Known())), LONG_S, stored
        ),
    )


def knows(greatest: int, newest_step: int = -1) -> Start:
    return lambda: ("a:1", Known(greatest, newest_step))


def test_all_share_one_fresh_incarnation() -> None:
    first, second = start(3, {}), start(3, {})
    assert first[0] == first[1] == first[2]
    assert first[0].incarnation.startswith("000000000001-")
    assert first[0].newest_step == -1
    assert first[0].incarnation != second[0].incarnation


@pytest.mark.parametrize("knowing", [0, 1, 2, "storage"])
def test_incarnation_comes_after_all_that_any_process_knows(knowing: int | str) -> None:
    starts = {p: knows(p, 3) for p in range(3)}
    known = knows(41, 100)
    if isinstance(knowing, int):
        found = start(3, {**starts, knowing: known}, lambda: Known(7, 5))
    else:
        found = start(3, starts, lambda: known()[1])
    assert {each.incarnation[:12] for each in found} == {"000000000042"}
    assert {each.newest_step for each in found} == {100}


def test_newest_complete_save_of_any_process_is_told_to_all() -> None:
    def complete(step: int) -> Start:
        save = SaveId(step=step, incarnation="000000000001-aaaaaaaaaaaaaaaa", run_id="run")
        return lambda: ("a:1", Known(1, 9, save))

    for found in start(4, {0: complete(7), 1: knows(1, 9), 2: complete(8)}):
        assert found.complete is not None
        assert found.complete.step == 8


@pytest.mark.parametrize("number", [10**12 - 1, 10**12, 2**62])
def test_number_at_the_limit_is_an_error_on_all(number: int) -> None:
    for found in start(3, {1: knows(number)}):
        assert isinstance(found, RestoreFailed)
        assert "there is no greater number" in str(found)


def test_storage_that_fails_at_the_leader_stops_all() -> None:
    def stored() -> Known:
        raise PersistentTierError("list", "/steps", "not allowed")

    for found in start(3, {}, stored):
        assert isinstance(found, RestoreFailed)
        assert "not allowed" in str(found)


def test_process_that_cannot_start_stops_all() -> None:
    def broken() -> tuple[str, Known]:
        raise OSError("no such ramdisk")

    own, *others = reversed(start(3, {2: broken}))
    assert isinstance(own, OSError)
    for other in others:
        assert isinstance(other, RestoreFailed)
        assert "process 2: no such ramdisk" in str(other)


def test_process_that_fails_by_any_error_stops_all() -> None:
    def broken() -> tuple[str, Known]:
        raise RuntimeError("can't start new thread")

    own, *others = reversed(start(3, {2: broken}))
    assert isinstance(own, RuntimeError)
    for other in others:
        assert isinstance(other, RestoreFailed)
        assert "process 2: unexpected RuntimeError: can't start new thread" in str(other)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("text", ["the log is full", "no \udce9"])
def test_error_before_a_process_joins_is_told_to_all(failing: int, text: str) -> None:
    service = MemoryService(3)

    def join(process: int) -> Any:
        coordinator = service.member(process)
        with start_told(coordinator):
            if process == failing:
                raise ValueError(text)
        return agree_start(coordinator, lambda: ("a:1", Known()), LONG_S)

    found = everywhere(3, join)
    assert isinstance(found.pop(failing), ValueError)
    for other in found:
        assert isinstance(other, RestoreFailed)
        assert f"process {failing}: unexpected ValueError: {text[:3]}" in str(other)


@pytest.mark.parametrize("failing", [0, 1])
def test_own_error_is_raised_where_another_never_comes(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emergency_ckpt.cluster.round._TOLD_LATE_S", 0.2)
    coordinator = MemoryService(3).member(failing)

    def fails() -> tuple[str, Known]:
        raise RamdiskFull("reserve", "slots", "no space left")

    with pytest.raises(RamdiskFull, match="no space left") as raised:
        agree_start(coordinator, fails, 0.2)
    assert isinstance(raised.value.__cause__, DeadlineExceeded)


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("slice", "fsdp"))


@pytest.mark.parametrize("axis", [0, 1, "slice", "fsdp"])
def test_slices_that_share_a_process_fail_together_and_are_one(axis: str | int) -> None:
    tree = describe({"x": 1}, "save")
    assert topology_of(mesh_of(2, 4), axis, tree, (), needs_whole=True) == Topology(1, (0,))


def test_without_a_mesh_that_of_the_state_is_taken_or_none() -> None:
    array = jax.device_put(np.zeros(8), NamedSharding(mesh_of(2, 4), P("fsdp")))
    for state in ({"x": array}, {"x": 1}, {}):
        tree = describe(state, "save")
        assert topology_of(None, "slice", tree, (), needs_whole=True) == Topology(1, (0,))


@pytest.mark.parametrize("axis", ["slices", 2])
def test_topology_axis_absent_from_the_states_mesh_is_an_error(axis: str | int) -> None:
    array = jax.device_put(np.zeros(8), NamedSharding(mesh_of(2, 4), P("fsdp")))
    with pytest.raises(ConfigError, match="none of the axes"):
        topology_of(None, axis, describe({"x": array}, "save"), (), needs_whole=True)


def test_placement_of_replicas_stores_each_shard_once() -> None:
    config = Config(local_dir="/dev/shm/x", run_id="r", mesh=mesh_of(2, 4))
    array = jax.device_put(np.zeros((8, 2), np.int8), NamedSharding(mesh_of(2, 4), P("fsdp")))
    placement = place_process(describe({"x": array, "n": 1}, "save"), config, (0, 1))
    assert [placed.nbytes for placed in placement.layout.shards] == [8, 4, 4, 4, 4]
    assert len(placement.held) == 5
    assert placement.buddies == ()


def test_placement_of_unstorable_state_is_refused_early() -> None:
    tree = describe({}, "save")
    local = Config(local_dir="/dev/shm/x", run_id="r")
    place_process(tree, local, (0, 1))
    with pytest.raises(InvalidState, match="it is empty"):
        place_process(tree, local.set(dir="/persistent"), (0, 1))
