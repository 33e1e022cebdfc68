"""A data loader's worker, forked beside slots, server and ledger, ends nothing of its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from world import World, save_all

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError


def _files_of(world: World) -> set[str]:
    root = world.ramdisk / "run"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def _use_all(checkpointer: EmergencyCheckpointer, world: World, path: Path) -> None:
    """What a worker may do with the checkpointer of its parent, by mistake or at its end."""
    told: list[str] = []
    for call in (
        lambda: checkpointer.save(step=9, state=world.state(9)),
        lambda: checkpointer.restore(state=world.state(0)),
    ):
        try:
            call()
        except CheckpointError as error:
            told.append(str(error))
    checkpointer.stop()
    path.write_text("\n".join(told))
    # Returning runs what a worker of multiprocessing runs at its end.


@pytest.mark.timeout(120)
def test_workers_end_leaves_slots_sockets_and_ledger(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2)
        before = _files_of(world)
        told = world.ramdisk.parent / "told"
        worker = multiprocessing.get_context("fork").Process(
            target=_use_all, args=(checkpointer, world, told)
        )
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        assert told.read_text().count("belongs to the parent process") == 2
        assert _files_of(world) == before
        save_all(checkpointer, world, 3, 4)
        address = checkpointer._opened.member.holdings.address
        assert checkpointer._opened.member.client.inventory(address).tensors
        assert checkpointer.latest_step() == 4
    with world.open_both() as checkpointer:
        _held = world.restores(4, host=True, by=checkpointer)


@pytest.mark.timeout(120)
def test_worker_that_lives_on_keeps_slots_from_nobody(world: World) -> None:
    """The parent saves through the mappings that it had at the fork, which the worker does not."""
    reading, writing = os.pipe()
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1, 2, 3)
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
        os.close(reading)
        save_all(checkpointer, world, 4, 5, 6)
        before = _files_of(world)
    with world.open() as checkpointer:  # the child still lives
        _held = world.restores(6, host=True, by=checkpointer)
        assert _files_of(world) == before
        save_all(checkpointer, world, 7)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0


def _tell_and_sleep(runs: Event) -> None:
    runs.set()
    for _ in range(600):
        time.sleep(0.1)  # CPython sleeps on if a signal comes right before the sleep


@pytest.mark.timeout(120)
def test_worker_that_is_told_to_end_gives_its_parent_no_notice(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        forks = multiprocessing.get_context("fork")
        runs = forks.Event()
        worker = forks.Process(target=_tell_and_sleep, args=(runs,))
        worker.start()
        assert runs.wait(60)  # CPython drops a signal that a fork gets before its first instruction
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == -signal.SIGTERM
        assert not checkpointer.reached_preemption(2)
        save_all(checkpointer, world, 2)
