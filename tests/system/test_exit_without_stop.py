"""A program that ends without ``stop``: it ends well, and what it saved last is whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
from memory_holdings import anonymous_mapping
from world import World

from emergency_ckpt.errors import TransferError
from emergency_ckpt.transfer import ShardTarget, TransferClient

SIZE_BYTES = 256 << 20
SECRET = "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
import emergency_ckpt.checkpointer as module
from emergency_ckpt import EmergencyCheckpointer
module._EXIT_TIMEOUT_S = 60.0  # a slow machine may not copy the state in ten seconds
local_dir, step, size_bytes, end = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
checkpointer = EmergencyCheckpointer(
    run_id="run", local_dir=local_dir,
    local_save_every=1, save_every=0)
state = {"w": jnp.full(size_bytes, step, jnp.uint8)}
checkpointer.save(step=step, state=state)
if end == "raise":
    raise KeyError("a bug")
if end == "exit":
    sys.exit(0)
if end == "served":
    checkpointer.wait_until_finished()
    print("saved", checkpointer._opened.member.holdings.address, flush=True)
    sys.stdin.readline()
if end == "soon":
    time.sleep(0.1)
"""


def program(world: World, step: int, end: str) -> subprocess.Popen[str]:
    arguments = [str(world.ramdisk), str(step), str(SIZE_BYTES), end]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "ECKPT_SECRET": SECRET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_last_save_is_whole(world: World) -> None:
    ends = {"return": 0, "soon": 0, "exit": 0, "raise": 1}
    for step, (end, returncode) in enumerate(ends.items(), start=1):
        process = program(world, step, end)
        _, log = process.communicate(timeout=120)
        assert process.returncode == returncode, log
        with world.open() as checkpointer:
            like = {"w": jax.ShapeDtypeStruct((SIZE_BYTES,), np.uint8)}
            found, state = checkpointer.restore(state=like)
            assert found == step, log
            assert np.all(np.asarray(state["w"]) == step)
            del state


def test_peer_may_be_fetching_when_the_program_ends(world: World) -> None:
    with program(world, 7, "served") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        word, _, address = process.stdout.readline().strip().partition(" ")
        assert word == "saved"
        with TransferClient(run_id="run", secret=SECRET.encode(), streams=2) as client:
            (held,) = client.inventory(address).tensors
            contents = client.fetch_contents(address, held.digest)
            targets = [ShardTarget(i, s.nbytes, s.offset) for i, s in enumerate(contents.shards)]
            into = anonymous_mapping(SIZE_BYTES)
            ended: list[TransferError] = []
            fetched = threading.Event()

            def fetch_until_the_end() -> None:
                try:
                    while True:
                        client.fetch_shards(address, held.digest, targets, into, 60)
                        fetched.set()
                except TransferError as error:
                    ended.append(error)

            thread = threading.Thread(target=fetch_until_the_end)
            thread.start()
            assert fetched.wait(60)
            time.sleep(0.02)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 0, process.stderr and process.stderr.read()
            thread.join(60)
            assert len(ended) == 1
