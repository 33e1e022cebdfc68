"""A ramdisk with no room for what a restore brings, or for the host states of saves."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from faults import fill_disk
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import World, logged, same, save_all, small_tmpfs

from emergency_ckpt.errors import RamdiskFull, SaveFailed

MIB = 1 << 20
STATE_BYTES, HOST_BYTES = 8 * MIB, 5 * MIB


@functools.cache
def random_bytes(step: int, count: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(step).bytes(count), np.uint8)


@pytest.fixture
def world(world: World) -> World:
    """Its states have 8 MiB."""

    def big(step: int) -> dict[str, Any]:
        return {
            "big": jax.device_put(
                random_bytes(step, STATE_BYTES), NamedSharding(world.mesh, P("fsdp"))
            )
        }

    world.more = big
    return world


def host_state(step: int) -> dict[str, Any]:
    return {"at": step, "blob": random_bytes(step, HOST_BYTES)}


def one_life(world: World, first: int | None, *, saves: int = 5) -> list[int]:
    """Restore, which must bring ``first``, save after it; return the steps that RAM has whole."""
    world.events.clear()
    with world.open_both() as checkpointer:
        host: dict[str, Any] = {}
        step, state = checkpointer.restore(state=world.state(0), host_state=host)
        assert step == first
        if step is not None:
            assert same(state, world.state(step))
            assert host["at"] == step
            assert np.array_equal(host["blob"], host_state(step)["blob"])
        for next_step in range((step or 0) + 1, (step or 0) + 1 + saves):
            checkpointer.save(
                step=next_step, state=world.state(next_step), host_state=host_state(next_step)
            )
            checkpointer.wait_until_finished()
    return [int(str(e.fields["step"])) for e in world.events if e.name == "save.complete"]


def full_events(world: World) -> list[int]:
    return [int(str(e.fields["step"])) for e in world.named("ram.off", cause="full")]


@pytest.mark.dear
@pytest.mark.parametrize("size_mib", [20, pytest.param(24, marks=pytest.mark.slow), 28])
def test_ramdisk_too_small_for_host_states_stops_no_restart(world: World, size_mib: int) -> None:
    with small_tmpfs(world.ramdisk, size_mib * MIB):
        assert one_life(world, None) in ([], [1])
        with logged() as lines:
            one_life(world, 4)
        assert full_events(world) == [4]
        told = [line for line in lines if line.startswith("ram.off.full: ")]
        assert any("step=4" in line and "no room" in line for line in told), lines
        one_life(world, 8)


@pytest.mark.dear
@pytest.mark.parametrize(
    "size_mib", [31, *(pytest.param(size, marks=pytest.mark.slow) for size in (36, 40)), 48]
)
def test_host_states_of_two_saves_beside_two_slots_suffice(world: World, size_mib: int) -> None:
    """What is beyond that makes way: the slot that storage reads, older host states."""
    with small_tmpfs(world.ramdisk, size_mib * MIB):
        assert one_life(world, None) == [1, 2, 3, 4, 5]
        assert one_life(world, 5) == [6, 7, 8, 9, 10]
        assert full_events(world) == []


@pytest.mark.dear
def test_ramdisk_smaller_than_a_slot_stops_no_restore(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    with small_tmpfs(world.ramdisk, STATE_BYTES // 2):
        with world.open_both() as checkpointer:
            world.restores(4, host=True, by=checkpointer)
            assert full_events(world) == [4]
            checkpointer.save(step=5, state=world.state(5), host_state={"at": 5})
            checkpointer.wait_until_finished()
            with pytest.raises(SaveFailed, match="RamdiskFull"):
                checkpointer.check_for_errors()
            world.restores(4, host=True, by=checkpointer)
            checkpointer.save(step=6, state=world.state(6), host_state={"at": 6})
            checkpointer.wait_until_finished()
        with world.open_both() as checkpointer:
            assert checkpointer.restore(state=world.state(0), host_state={})[0] == 6


def test_start_without_room_or_a_step_is_an_error(world: World) -> None:
    with (
        small_tmpfs(world.ramdisk, 20 * MIB),
        world.open_both() as checkpointer,
        pytest.raises(RamdiskFull, match="host states of two saves"),
    ):
        checkpointer.restore(state=world.state(0), host_state=host_state(0))


def test_first_save_without_room_for_host_states_is_an_error(world: World) -> None:
    with (
        small_tmpfs(world.ramdisk, 20 * MIB),
        world.open_both() as checkpointer,
        pytest.raises(RamdiskFull, match="host states of two saves"),
    ):
        checkpointer.save(step=1, state=world.state(1), host_state=host_state(1))


def test_restore_in_place_beside_a_full_ramdisk(world: World) -> None:
    with small_tmpfs(world.ramdisk, 64 * MIB), world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
        fill_disk(world.ramdisk / "filler")
        _held = world.restores(4, host=True, by=checkpointer)
        (world.ramdisk / "filler").unlink()
        save_all(checkpointer, world, 5, 6)


def test_ram_works_again_once_there_is_room(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    with small_tmpfs(world.ramdisk, 64 * MIB):
        with world.open_both() as checkpointer:
            fill_disk(world.ramdisk / "filler")
            state = world.restores(4, host=True, by=checkpointer)
            assert full_events(world) == [4]
            (world.ramdisk / "filler").unlink()
            save_all(checkpointer, world, 5)
            assert same(state, world.state(4))
        with world.open(local_save_every=1) as checkpointer:
            world.restores(5, host=True, by=checkpointer)


def test_rollback_beside_a_full_ramdisk(world: World) -> None:
    with small_tmpfs(world.ramdisk, 64 * MIB), world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
        fill_disk(world.ramdisk / "filler")
        assert checkpointer.restore(state=world.state(0), host_state={}, step=2)[0] == 2
        (world.ramdisk / "filler").unlink()
        save_all(checkpointer, world, 3)
        assert checkpointer.restore(state=world.state(0), host_state={})[0] == 3
