"""The worked example of FORMAT.md, from the code. The golden files hold its bytes for ever."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.core.timeline import Ancestor, Timeline
from emergency_ckpt.ram import build_contents
from emergency_ckpt.ram.process_files import Ledger
from emergency_ckpt.state import host_state
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardId, Writer

SAVE = SaveId(step=40, incarnation="000000000006-5e9d5e9d5e9d5e9d", run_id="demo")

LEAVES = (
    LeafSpec("params/w", "float32", (4, 2)),
    LeafSpec("params/b", "bfloat16", (3,)),
    LeafSpec("rng", "uint32", (2,), "threefry2x32"),
)
ARRAYS = {
    ShardId("params/w", ((2, 4), (0, 2))): np.array([[1.0, -0.0], [math.nan, 0.5]], "<f4"),
    ShardId("params/b", ((0, 3),)): np.array([1, 2, 3], ml_dtypes.bfloat16),
    ShardId("rng", ((0, 2),)): np.array([0, 42], "<u4"),
}
LAYOUT = lay_out(LEAVES, [(shard, array.nbytes) for shard, array in ARRAYS.items()])


class Iterator:
    """An iterator at position 160."""

    def get_state(self) -> object:
        return {"position": 160, "seen": b"\x00\xff", "window": (1, 2.5)}

    def set_state(self, state: object) -> None:
        raise NotImplementedError


def writer() -> Writer:
    return Writer(process_index=3, process_count=8, slice_index=1, hostname="host-3")


def contents() -> Contents:
    crcs = [_native.crc32c(ARRAYS[placed.shard].tobytes()) for placed in LAYOUT.shards]
    return build_contents(SAVE, LEAVES, LAYOUT, crcs)


def ledger() -> Ledger:
    """Of a process in whose seventh life a restore of step 40 was binding."""
    seventh, sixth, fourth = (f"{number:012d}-5e9d5e9d5e9d5e9d" for number in (7, 6, 4))
    chain = Timeline(seventh, 40, (Ancestor(sixth, 40), Ancestor(fourth, 20)), 0)
    return Ledger(seventh, chain, SaveId(45, seventh, "demo"))


def log_version() -> Table:
    """A version with step 40, which is being removed, and step 45."""
    known = ledger()
    removing = Entry(
        step=SAVE.step,
        incarnation=SAVE.incarnation,
        state="removing",
        marker="c3" * 32,
        processes=2,
        size_bytes=20,
        saved_s=1100.0,
    )
    added = Entry(
        step=45,
        incarnation=known.incarnation,
        marker="d4" * 32,
        processes=2,
        stateful=True,
        size_bytes=20,
        saved_s=1200.0,
        metrics={"loss": 0.5},
    )
    return Table(
        number=14,
        run_id="demo",
        from_dir=False,
        incarnation=known.incarnation,
        chain=known.chain,
        steps=(removing, added),
        greatest=7,
    )


def slot_bytes() -> bytes:
    data = bytearray(LAYOUT.size_bytes)
    for placed in LAYOUT.shards:
        data[placed.offset : placed.offset + placed.nbytes] = ARRAYS[placed.shard].tobytes()
    return bytes(data)


def host_state_document() -> bytes:
    state = {
        "iterator": Iterator(),
        "best": -math.inf,
        "seed": 1 << 70,
        1: "a key that is not a string",
        "table": np.array([1, 2], np.uint16),
    }
    return host_state.encode(SAVE, 3, 8, host_state.capture(state))
