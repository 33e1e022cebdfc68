"""A program that ends without ``stop`` ends well while a peer fetches from it."""

from __future__ import annotations

import subprocess
import threading
import time

from memory_holdings import anonymous_mapping
from programs import started
from transfer_support import fetch_contents
from world import World

from emergency_ckpt.errors import TransferError
from emergency_ckpt.transfer import ShardTarget, TransferClient

SIZE_BYTES = 256 << 20
SECRET = "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
PROGRAM = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from emergency_ckpt import EmergencyCheckpointer
checkpointer = EmergencyCheckpointer(
    run_id="run", local_dir=sys.argv[1],
    local_save_every=1, save_every=0)
checkpointer.save(step=7, state={"w": jnp.full(int(sys.argv[2]), 7, jnp.uint8)})
checkpointer.wait_until_finished()
print("saved", checkpointer._opened.member.holdings.address, flush=True)
sys.stdin.readline()
"""


def test_peer_may_be_fetching_when_the_program_ends(world: World) -> None:
    words = ("-c", PROGRAM, world.ramdisk, SIZE_BYTES)
    with started(*words, env={"ECKPT_SECRET": SECRET}, stderr=subprocess.PIPE) as process:
        word, _, address = process.line().partition(" ")
        assert word == "saved"
        with TransferClient(run_id="run", secret=SECRET.encode(), streams=2) as client:
            (held,) = client.inventory(address).tensors
            contents = fetch_contents(client, address, held.digest)
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
            process.say()
            assert process.wait(60) == 0, process.stderr and process.stderr.read()
            thread.join(60)
            assert len(ended) == 1
