"""Saves with real bytes, for tests of the local tier."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from emergency_ckpt.core.shard_layout import Layout, lay_out
from emergency_ckpt.ram import LocalTier, OtherRuns, build_contents
from emergency_ckpt.ram.slot_choice import SLOTS_AT_REST
from emergency_ckpt.ram.tier import SlotWriter
from emergency_ckpt.state import host_state
from emergency_ckpt.state.mapped import Pin
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardId, Writer

RUN_ID = "run-7"

LEAVES = (
    LeafSpec("params/w", "float32", (64, 32)),
    LeafSpec("params/b", "bfloat16", (33,)),
    LeafSpec("empty", "int8", (0, 3)),
    LeafSpec("count", "int32", ()),
    LeafSpec("rng", "uint32", (2,), "threefry2x32"),
)
SHARDS = (
    (ShardId("params/w", ((0, 32), (0, 32))), 4096),
    (ShardId("params/w", ((32, 64), (0, 32))), 4096),
    (ShardId("params/b", ((0, 33),)), 66),
    (ShardId("empty", ((0, 0), (0, 3))), 0),
    (ShardId("count", ()), 4),
    (ShardId("rng", ((0, 2),)), 8),
)
LAYOUT = lay_out(LEAVES, SHARDS)
W_SHARD = 3
"""Number of the first shard of params/w: 4096 bytes, float32."""
assert LAYOUT.shards[W_SHARD].shard == SHARDS[0][0]
_opened: list[LocalTier] = []


def open_tier(
    ramdisk: Path,
    *,
    run_id: str = RUN_ID,
    process_index: int = 0,
    process_count: int = 4,
    slice_index: int = 0,
    slots: int = SLOTS_AT_REST,
    start: str = "this start",
    wait_s: float = 0.0,
    other_runs: OtherRuns | None = None,
) -> LocalTier:
    """Open a tier, which ``close_tiers`` closes where its owner has not."""
    tier = LocalTier(
        ramdisk,
        run_id,
        Writer(process_index, process_count, slice_index, "host-0"),
        copy_threads=2,
        slots=slots,
        start=start,
        wait_s=wait_s,
        other_runs=other_runs,
    )
    _opened.append(tier)
    return tier


def close_tiers() -> None:
    while _opened:
        _opened.pop().close()


def save_id(step: int, incarnation: str = "000000000001-first", run_id: str = RUN_ID) -> SaveId:
    return SaveId(step=step, incarnation=incarnation, run_id=run_id)


def shard_bytes(step: int, layout: Layout = LAYOUT) -> list[bytes]:
    """The bytes of every shard at a step, in layout order: different for each step."""
    generator = np.random.Generator(np.random.PCG64(step))
    return [generator.bytes(placed.nbytes) for placed in layout.shards]


def fill(writer: SlotWriter, save: SaveId, layout: Layout = LAYOUT) -> Contents:
    data = shard_bytes(save.step, layout)
    places = [placed.offset for placed in layout.shards]
    crcs = writer.copy(list(zip(data, places, strict=True)))
    return build_contents(save, LEAVES, layout, crcs)


def write_save(
    tier: LocalTier, step: int, incarnation: str = "000000000001-first", layout: Layout = LAYOUT
) -> str:
    """Publish one save, whole unless ``layout`` has parts; returns its digest."""
    save = save_id(step, incarnation)
    with tier.begin_write(save, layout.size_bytes) as writer:
        digest = writer.stage(fill(writer, save, layout))
        writer.publish()
    return digest


def publish(
    tier: LocalTier,
    save: SaveId,
    leaves: Sequence[LeafSpec],
    shards: Mapping[ShardId, np.ndarray | bytes],
    **settings: bool,
) -> str:
    """Publish a save of these shards, which need not be all of ``leaves``; return its digest."""
    data = {
        shard: each if isinstance(each, bytes) else each.tobytes() for shard, each in shards.items()
    }
    layout = lay_out(leaves, [(shard, len(each)) for shard, each in data.items()])
    with tier.begin_write(save, layout.size_bytes, **settings) as writer:
        crcs = writer.copy([(data[placed.shard], placed.offset) for placed in layout.shards])
        digest = writer.stage(build_contents(save, leaves, layout, crcs))
        writer.publish()
    return digest


def complete_save(tier: LocalTier, step: int) -> str:
    """Publish a save and note it as globally complete."""
    digest = write_save(tier, step)
    tier.note_complete(save_id(step))
    return digest


def document(step: int, owner: int = 0, count: int = 4, value: object = 17) -> bytes:
    return host_state.encode(save_id(step), owner, count, host_state.capture(value))


def whole_step(
    tier: LocalTier, step: int, owners: Iterable[int] = range(4), value: object = 17
) -> None:
    """Save a step with the host states of ``owners``, which all have ``value``."""
    for owner in owners:
        tier.publish_host_state(save_id(step), owner, 4, document(step, owner, value=value))
    complete_save(tier, step)


def whole_steps(
    ramdisk: Path,
    *steps: int,
    processes: Iterable[int] = range(2),
    owners: int = 4,
    value: object = 17,
) -> list[Path]:
    """Save steps on each of some processes, all bytes on each; return their directories.

    Each has the host states of so many ``owners`` of the four.
    """
    tiers = {each: open_tier(ramdisk, process_index=each) for each in processes}
    for process, tier in tiers.items():
        tier.reserve(LAYOUT.size_bytes)
        for step in steps:
            first = process * owners % 4
            whole_step(tier, step, range(first, first + owners), value)
    for tier in tiers.values():
        tier.close()
    return [tier.path for tier in tiers.values()]


def held_steps(tier: LocalTier) -> list[int]:
    return [held.save.step for held in tier.held()[0]]


def assert_whole(tier: LocalTier, digest: str, step: int) -> None:
    """Every byte of a save is as it was written."""
    everything = range(len(LAYOUT.shards))
    assert tier.verify(digest, everything) == []
    with tier.reading(digest) as view:
        assert [view(shard).tobytes() for shard in everything] == shard_bytes(step)


def shard_here(tier: LocalTier, digest: str, shard: int) -> bytes:
    """Return the bytes of a shard, of a copy that is not known to be damaged."""
    with tier.reading(digest) as view:
        return view(shard).tobytes()


def pinned_save(tier: LocalTier, step: int) -> tuple[str, Pin]:
    """Publish a save, and pin its slot as for storage; note the save as complete."""
    save = save_id(step)
    with tier.begin_write(save, LAYOUT.size_bytes) as writer:
        digest = writer.stage(fill(writer, save))
        pin = writer.pin()
        writer.publish()
    tier.note_complete(save)
    return digest, pin


def slot_files(tier: LocalTier) -> set[str]:
    return {name for name in files_of(tier) if name.endswith(".bin")}


def files_of(tier: LocalTier) -> set[str]:
    return {path.name for path in tier.path.iterdir()}


def make_old(directory: Path, age_s: float) -> None:
    """Nothing in it has changed for so long."""
    changed_s = time.time() - age_s
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (changed_s, changed_s))
