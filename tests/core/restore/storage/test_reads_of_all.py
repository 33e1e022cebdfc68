"""Where all share a machine, each process reads what it needs; each box has one that must."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.boxes import covers, volume
from emergency_ckpt.core.restore.storage.reads_of_all import ProcessReads, assign_reads_to_all
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.types import Box, ShardId


def rows(size: int, parts: int, width: int = 4) -> list[Box]:
    step = size // parts
    return [((at, at + step), (0, width)) for at in range(0, size, step)]


def read(reads: ProcessReads) -> list[Box]:
    return sorted(each.shard.box for each in (*reads.own, *reads.more))


def test_replicas_read_all_that_they_need_as_they_need_it() -> None:
    array = StoredArray("w", (8, 4), (2, 4), 4)
    targets = {p: (ShardId("w", box),) for p, box in enumerate(rows(8, 2) * 2)}
    found = assign_reads_to_all(targets, {"w": array}, {"w": rows(8, 4)})
    for process, (shard,) in targets.items():
        assert read(found[process]) == [shard.box]
        (only,) = (*found[process].own, *found[process].more)
        assert only.parts == tuple(part for part in rows(8, 4) if part[0][0] // 4 == process % 2)
    assert Counter(len(reads.own) for reads in found.values()) == {1: 2, 0: 2}


def test_box_needed_in_parts_is_read_as_it_was_saved() -> None:
    array = StoredArray("w", (8, 4), (8, 4), 4)
    targets = {p: (ShardId("w", box),) for p, box in enumerate(rows(8, 4))}
    found = assign_reads_to_all(targets, {"w": array}, {"w": rows(8, 1)})
    assert sorted(box for reads in found.values() for box in read(reads)) == rows(8, 1)


def test_saved_boxes_side_by_side_are_not_put_together() -> None:
    array = StoredArray("w", (8, 4), (8, 2), 4)
    saved: list[Box] = [((0, 8), (0, 2)), ((0, 8), (2, 4))]
    targets = dict.fromkeys(range(2), (ShardId("w", ((0, 8), (0, 4))),))
    found = assign_reads_to_all(targets, {"w": array}, {"w": saved})
    assert all(read(reads) == saved for reads in found.values())


Job = tuple[dict[int, tuple[ShardId, ...]], dict[str, StoredArray], dict[str, list[Box]]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    processes = draw(st.integers(1, 5))
    arrays: dict[str, StoredArray] = {}
    saved: dict[str, list[Box]] = {}
    wanted: dict[int, list[ShardId]] = {p: [] for p in range(processes)}

    def grid(shape: tuple[int, ...]) -> list[Box]:
        cuts = [draw(st.sampled_from([1, 2, 3])) for _ in shape]
        spans = [
            [(i * size // n, (i + 1) * size // n) for i in range(n)]
            for size, n in zip(shape, cuts, strict=True)
        ]
        return list(product(*spans))

    for number in range(draw(st.integers(0, 3))):
        name = f"leaf{number}"
        shape = tuple(draw(st.integers(0, 12)) for _ in range(draw(st.integers(0, 3))))
        chunk = tuple(draw(st.integers(1, max(1, size))) for size in shape)
        arrays[name] = StoredArray(name, shape, chunk, 4)
        boxes = grid(shape)
        for process, shards in wanted.items():
            shards.append(ShardId(name, boxes[process % len(boxes)]))
        known = [box for box in grid(shape) if volume(box)]
        saved[name] = draw(st.lists(st.sampled_from(known), unique=True)) if known else []
    return {p: tuple(shards) for p, shards in wanted.items()}, arrays, saved


@given(jobs())
def test_rules_hold_for_any_job(job: Job) -> None:
    targets, arrays, saved = job
    found = assign_reads_to_all(targets, arrays, saved)
    assert found == assign_reads_to_all(dict(reversed(targets.items())), arrays, saved)
    own = [each for reads in found.values() for each in reads.own]
    assert len({each.shard for each in own}) == len(own), "each has one that must read it"
    for process, reads in found.items():
        assert set(reads.more) <= set(own)
        assert not set(reads.more) & set(reads.own)
        for each in reads.more:
            assert any(
                shard.leaf == each.shard.leaf and covers(each.shard.box, [shard.box])
                for shard in targets[process]
            )
    for each in own:
        assert sum(map(volume, each.parts)) == volume(each.shard.box)
        assert covers(each.shard.box, each.parts)
    for shard in {shard for target in targets.values() for shard in target}:
        assert covers(shard.box, [e.shard.box for e in own if e.shard.leaf == shard.leaf])
