"""Replicas that should be equal and are not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_world import Layout, contents_of

from emergency_ckpt.core.restore.divergence import find_divergence
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardEntry, ShardId

LAYOUT = Layout(2, 1)
SAVE = SaveId(7, "a", "run")


def contents(crc: int, save: SaveId = SAVE) -> Contents:
    return contents_of(save, LAYOUT.leaves(), LAYOUT.shards(0), crc)


def with_crc(base: Contents, shard: int, crc: int) -> Contents:
    shards = list(base.shards)
    shards[shard] = msgspec.structs.replace(shards[shard], crc32c=crc)
    return msgspec.structs.replace(base, shards=tuple(shards))


def test_equal_replicas_do_not_diverge() -> None:
    assert find_divergence(SAVE, {"process/0": (contents(1),), "process/1": (contents(1),)}) == []


def test_divergence_names_shard_step_and_holders_most_first() -> None:
    good = contents(1)
    held = {"process/0": (with_crc(good, 1, 9),), "process/1": (good,), "process/2": (good,)}
    (found,) = find_divergence(SAVE, held)
    assert found.shard == ShardId("w", ((0, 8), (0, 2)))
    assert found.copies == ((1, ("process/1", "process/2")), (9, ("process/0",)))
    assert found.describe() == (
        "step 7: copies of w[0:8, 0:2] differ: "
        "00000001 at process/1, process/2; 00000009 at process/0"
    )


def test_other_saves_are_not_compared() -> None:
    later = contents(2, SaveId(8, "a", "run"))
    assert find_divergence(SAVE, {"process/0": (contents(1),), "process/1": (later,)}) == []


def _by_definition(save: SaveId, held: dict[str, tuple[Contents, ...]]) -> dict[ShardId, set[int]]:
    found: dict[ShardId, set[int]] = {}
    for every in held.values():
        for one in every:
            for index, entry in enumerate(one.shards if one.save == save else ()):
                found.setdefault(one.shard_id(index), set()).add(entry.crc32c)
    return {shard: crcs for shard, crcs in found.items() if len(crcs) > 1}


@pytest.mark.dear
@given(st.data())
def test_what_diverges_is_what_the_definition_says(data: st.DataObject) -> None:
    leaves = tuple(LeafSpec(path, "uint8", (4,)) for path in "abc")
    boxes = [((0, 4),), ((0, 2),), ((2, 4),)]
    held: dict[str, tuple[Contents, ...]] = {}
    for holder in "xyz":
        chosen = data.draw(
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from(boxes)), unique=True, max_size=6)
        )
        shards = tuple(
            # Of equal boxes some are one object and some are not.
            ShardEntry(leaf, box if data.draw(st.booleans()) else (tuple(box[0]),), 0, 4, crc)
            for leaf, box in sorted(chosen)
            for crc in (data.draw(st.integers(1, 2)),)
        )
        held[holder] = (Contents(SAVE, leaves, shards),)
    found = find_divergence(SAVE, held)
    expected = _by_definition(SAVE, held)
    assert {each.shard: {crc for crc, _ in each.copies} for each in found} == expected
