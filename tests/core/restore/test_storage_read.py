"""Each stored chunk is read by one process, all targets are covered, and the load is even."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.boxes import covers, volume
from emergency_ckpt.core.restore.storage_read import TOLERANCE, StoredArray, assign_reads
from emergency_ckpt.types import Box, ShardId


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """The boxes of an array that is cut evenly, as JAX's shardings cut it."""
    cuts = [
        [(i * size // n, (i + 1) * size // n) for i in range(n)]
        for size, n in zip(shape, parts, strict=True)
    ]
    return list(product(*cuts))


def chunks_of(box: Box, array: StoredArray) -> list[Box]:
    cells = [
        [(at, min(at + c, size)) for at in range(start // c * c, stop, c)]
        for (start, stop), c, size in zip(box, array.chunk_shape, array.shape, strict=True)
    ]
    return list(product(*cells))


def check(
    targets: dict[int, tuple[ShardId, ...]],
    arrays: dict[str, StoredArray],
    saved: Mapping[str, list[Box]] = MappingProxyType({}),
) -> dict[int, int]:
    """The rules that hold for every input; returns the bytes that each process reads."""
    reads = assign_reads(targets, arrays, saved)
    assert sorted(reads) == sorted(targets)
    again = assign_reads(dict(reversed(targets.items())), arrays, saved)
    assert reads == again
    seen: set[tuple[str, Box]] = set()
    held: dict[str, list[Box]] = {}
    loads: dict[int, int] = {}
    largest = max(
        (volume(box) * arrays[leaf].item_bytes for leaf, boxes in saved.items() for box in boxes),
        default=0,
    )
    for process, shards in reads.items():
        loads[process] = 0
        for shard in shards:
            array = arrays[shard.leaf]
            for chunk in chunks_of(shard.box, array):
                assert (shard.leaf, chunk) not in seen, f"{chunk} of {shard.leaf} is read twice"
                seen.add((shard.leaf, chunk))
                largest = max(largest, volume(chunk) * array.item_bytes)
            held.setdefault(shard.leaf, []).append(shard.box)
            loads[process] += volume(shard.box) * array.item_bytes
    for target in targets.values():
        for shard in target:
            assert covers(shard.box, held.get(shard.leaf, ()))
    share = sum(loads.values()) / len(loads)
    assert max(loads.values()) <= max((1 + TOLERANCE) * share, share + largest)
    return loads


def replicated_slices(slices: int, hosts: int, leaves: int) -> tuple[dict, dict]:
    arrays: dict[str, StoredArray] = {}
    wanted: dict[int, list[ShardId]] = {p: [] for p in range(slices * hosts)}
    for number in range(leaves):
        name = f"leaf{number:03}"
        arrays[name] = StoredArray(name, (64 * hosts, 32), (64, 32), 4)
        for position, box in enumerate(grid((64 * hosts, 32), (hosts, 1))):
            for index in range(slices):
                wanted[index * hosts + position].append(ShardId(name, box))
    return {p: tuple(shards) for p, shards in wanted.items()}, arrays


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_replicas_share_the_reading_and_each_reads_what_it_needs(slices: int) -> None:
    targets, arrays = replicated_slices(slices, 4, 64)
    loads = check(targets, arrays)
    assert len(set(loads.values())) == 1
    for process, shards in assign_reads(targets, arrays).items():
        assert set(shards) <= set(targets[process])


def test_one_big_leaf_is_split_along_its_chunks() -> None:
    array = StoredArray("w", (1000, 16), (10, 16), 4)
    targets = dict.fromkeys(range(8), (ShardId("w", ((0, 1000), (0, 16))),))
    loads = check(targets, {"w": array})
    assert max(loads.values()) <= 13 * 10 * 16 * 4


def test_box_with_a_known_crc_has_one_reader_for_many_chunks() -> None:
    array = StoredArray("w", (1000, 16), (10, 16), 4)
    saved = grid((1000, 16), (2, 1))
    for parts in ((1, 1), (2, 1), (8, 1)):  # the same mesh, and others
        targets = {
            process: (ShardId("w", box),) for process, box in enumerate(grid((1000, 16), parts))
        }
        reads = assign_reads(targets, {"w": array}, {"w": saved})
        assert sorted(s.box for shards in reads.values() for s in shards) == saved


@pytest.mark.parametrize("missing", [(0,), (3,), (1, 2), (0, 1), (0, 1, 2)])
def test_boxes_whose_crc_is_not_known_are_read_too(missing: tuple[int, ...]) -> None:
    array = StoredArray("w", (20, 6), (10, 3), 4)
    boxes = grid((20, 6), (2, 2))
    saved = [box for number, box in enumerate(boxes) if number not in missing]
    targets = {process: (ShardId("w", box),) for process, box in enumerate(boxes)}
    reads = assign_reads(targets, {"w": array}, {"w": saved})
    read = [shard.box for shards in reads.values() for shard in shards]
    assert set(saved) <= set(read)
    assert covers(((0, 20), (0, 6)), read)


def test_scalars_empty_leaves_and_leaves_that_are_not_stored() -> None:
    scalar = StoredArray("s", (), (), 4)
    target = (ShardId("s", ()), ShardId("none", ((0, 0), (0, 4))), ShardId("other", ((0, 3),)))
    reads = assign_reads(dict.fromkeys(range(3), target), {"s": scalar})
    assert [shard for shards in reads.values() for shard in shards] == [ShardId("s", ())]


def test_large_job_is_planned_in_little_time() -> None:
    targets, arrays = replicated_slices(4, 128, 40)
    check_sum = sum(len(shards) for shards in assign_reads(targets, arrays).values())
    assert check_sum == 128 * 40


@st.composite
def stored_states(draw: st.DrawFn) -> tuple[dict, dict]:
    processes = draw(st.integers(1, 6))
    arrays: dict[str, StoredArray] = {}
    wanted: dict[int, list[ShardId]] = {p: [] for p in range(processes)}
    for number in range(draw(st.integers(0, 4))):
        name = f"leaf{number}"
        rank = draw(st.integers(0, 3))
        shape = tuple(draw(st.integers(0, 12)) for _ in range(rank))
        chunk = tuple(draw(st.integers(1, max(1, size))) for size in shape)
        arrays[name] = StoredArray(name, shape, chunk, draw(st.sampled_from([1, 2, 4])))
        parts = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(rank))
        boxes = grid(shape, parts)
        for process, shards in wanted.items():
            shards.append(ShardId(name, boxes[process % prod(parts)]))
    return {p: tuple(shards) for p, shards in wanted.items()}, arrays


@pytest.mark.dear
@given(stored_states(), st.data())
def test_rules_hold_for_any_state(state: tuple[dict, dict], data: st.DataObject) -> None:
    targets, arrays = state
    saved: dict[str, list[Box]] = {}
    for name, array in arrays.items():
        parts = tuple(data.draw(st.sampled_from([1, 2, 3])) for _ in array.shape)
        boxes = [box for box in grid(array.shape, parts) if volume(box)]
        saved[name] = data.draw(st.lists(st.sampled_from(boxes), unique=True)) if boxes else []
    check(targets, arrays, saved)
