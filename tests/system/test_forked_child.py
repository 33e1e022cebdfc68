"""A worker made by fork outlives its trainer, which was killed: it keeps nothing from the next."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import free_port
from memory_holdings import MemoryHoldings
from programs import started
from transfer_support import RUN_ID, SECRET, Shares, connect, greet_by_hand
from world import World, save_all

from emergency_ckpt.transfer import TransferServer, sealing
from emergency_ckpt.transfer.stream import Stream

PROGRAM = """
import os, sys, time
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError

checkpointer = EmergencyCheckpointer(
    run_id="run", local_dir=sys.argv[1], bind_port=int(sys.argv[2]),
    local_save_every=1, save_every=0)
checkpointer.save(step=1, state={"w": jnp.ones(8)})
checkpointer.wait_until_finished()
if os.fork() == 0:
    try:
        checkpointer.save(step=2, state={})
    except CheckpointError as error:
        print("child:", error, flush=True)
    checkpointer.stop()
    sys.stdin.readline()
    with checkpointer:
        pass
    print("child is at its end", flush=True)
    sys.exit(0)  # runs what atexit knows
time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_child_of_a_killed_trainer_keeps_neither_lock_nor_port(world: World) -> None:
    port = free_port()
    with started("-c", PROGRAM, world.ramdisk, port) as trainer:
        said = trainer.line()
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(60)
        assert "the checkpointer belongs to the parent process" in said
        with world.open(bind_port=port) as checkpointer:
            assert [path.name for path in (world.ramdisk / "run").iterdir()] == ["process_00000"]
            save_all(checkpointer, world, 2)
        trainer.say()
        assert trainer.line() == "child is at its end"


@contextlib.contextmanager
def forked_child() -> Iterator[int]:
    """A child lives on inside, and does nothing. Gives its process id."""
    until, lives = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(lives)
        os.read(until, 1)  # to the parent's end of the test
        os._exit(0)
    os.close(until)
    try:
        yield child
    finally:
        os.close(lives)
        assert os.waitpid(child, 0)[1] == 0


def test_child_keeps_no_connection_of_its_parent() -> None:
    """Else the peer would not see that the parent has closed the connection, or has died."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = Stream(socket.create_connection(listener.getsockname()), "peer")
        peer, _ = listener.accept()
    with forked_child(), peer:
        stream.close()
        peer.settimeout(30)
        assert peer.recv(1) == b""


def test_child_keeps_no_unproved_connection() -> None:
    """A peer that proves it after the fork would wait for its dead server for ever."""
    with TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET) as server:
        peer = connect(server.address)
        greet_by_hand(peer, Shares())
        with forked_child(), peer:
            server.stop()
            assert peer.recv(1) == b""


def maps_of(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


def test_child_keeps_no_memory_of_its_parents_slots(world: World) -> None:
    """Else the RAM of a slot that the parent deletes would be free only at the child's end."""
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        assert str(world.ramdisk) in maps_of(os.getpid())
        with forked_child() as child:
            assert str(world.ramdisk) not in maps_of(child)
        save_all(checkpointer, world, 2)


def test_child_takes_no_piece_buffer_of_its_parent() -> None:
    """The child has no memory there."""
    with sealing.buffer() as kept:
        pass
    child = os.fork()
    if child == 0:
        with sealing.buffer() as own:
            own.view[0] = 1
        os._exit(0 if own is not kept else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_fork_leaves_the_parents_connections_alone(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        save_all(checkpointer, world, 2)
        address = checkpointer._opened.member.holdings.address
        assert checkpointer._opened.member.client.inventory(address).tensors
