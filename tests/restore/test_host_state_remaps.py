"""Iterators of Grain in a job of another size: nothing is left out, little comes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import grain.python as grain
import pytest
from grain.experimental import ElasticIterator
from hypothesis import given, settings
from hypothesis import strategies as st

from emergency_ckpt.core.position_remap import Unmovable, move_position
from emergency_ckpt.errors import HostStateError
from emergency_ckpt.remaps import same_on_all, smallest_position
from emergency_ckpt.restore.host_state import apply_host_state
from emergency_ckpt.state import host_state
from emergency_ckpt.types import SaveId

SIZE = 48
SAVE = SaveId(3, "life", "run")


class Numbers:
    """A data source of Grain's kind."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index

    def __repr__(self) -> str:
        return "Numbers()"


def sliced(index: int, count: int) -> Any:
    return iter(grain.MapDataset.range(SIZE).shuffle(seed=1)[index::count].to_iter_dataset())


def loader(index: int, count: int, sampler: Any = grain.SequentialSampler) -> Any:
    shards = grain.ShardOptions(index, count, drop_remainder=True)
    shuffled = {"shuffle": True, "seed": 1, "num_epochs": 1}
    made = sampler(SIZE, shards, **({} if sampler is grain.SequentialSampler else shuffled))
    return iter(grain.DataLoader(data_source=Numbers(), sampler=made, operations=[]))


def stretches(index: int, count: int) -> Any:
    return loader(index, count, grain.IndexSampler)


def documents_of(values: list[Any]) -> list[host_state.HostStateDocument]:
    return [
        host_state.decode(host_state.encode(SAVE, owner, len(values), host_state.capture(value)))
        for owner, value in enumerate(values)
    ]


def moved(
    build: Callable[[int, int], Any], former: int, count: int, remap: Any, *, rounds: int
) -> tuple[list[int], list[Any]]:
    """Return the items that ``former`` processes read, and the iterators of the next job."""
    before = [build(index, former) for index in range(former)]
    seen = [int(next(iterator)) for _ in range(rounds) for iterator in before]
    documents = documents_of([{"data": [iterator]} for iterator in before])
    after: list[Any] = []
    for index in range(count):
        target = {"data": [build(index, count)]}
        apply_host_state(target, documents, remap, (index, count))
        after.append(target["data"][0])
    return seen, after


@pytest.mark.parametrize("build", [sliced, loader], ids=["slices", "a loader"])
@settings(max_examples=15)
@given(former=st.integers(1, 6), count=st.integers(1, 6), rounds=st.integers(0, 6))
def test_smallest_position_leaves_nothing_out(
    build: Any, former: int, count: int, rounds: int
) -> None:
    if build is loader:  # its shards drop what does not fill a round of all processes
        former, count = (min(n, 4) if n != 5 else 4 for n in (former, count))
    seen, after = moved(build, former, count, smallest_position(), rounds=rounds)
    rest = [int(value) for iterator in after for value in islice(iterator, SIZE)]
    times = Counter(seen + rest)
    assert set(times) == set(range(SIZE))
    again = [number for number, found in times.items() if found > 1]
    assert len(again) < count
    assert max(times.values()) <= 2


def test_smallest_position_counts_the_process_behind() -> None:
    states = [{"next_index": position} for position in (6, 4, 5)]
    assert move_position(states, 0, 2) == {"next_index": 6}
    assert move_position(states, 1, 2, global_batch_kept=True) == {"next_index": 4}


def test_smallest_position_refuses_stretches_unless_told() -> None:
    with pytest.raises(HostStateError, match=r"\['data'\]\[0\].*IndexSampler cuts the data"):
        moved(stretches, 2, 4, smallest_position(), rounds=3)
    seen, after = moved(stretches, 2, 4, smallest_position(approximate=True), rounds=4)
    rest = [int(value) for iterator in after for value in islice(iterator, SIZE // 4)]
    assert len(seen) + len(rest) >= SIZE


def elastic(index: int, count: int) -> Any:
    data = grain.MapDataset.range(SIZE).shuffle(seed=1)
    return iter(ElasticIterator(data, 12, grain.ShardOptions(index, count)))


def test_same_on_all_is_exact_for_elastic_iterators() -> None:
    before = [elastic(index, 2) for index in range(2)]
    seen = [int(n) for iterator in before for n in next(iterator)]
    after = [elastic(index, 3) for index in range(3)]
    for index, iterator in enumerate(after):
        apply_host_state(iterator, documents_of(before), same_on_all(), (index, 3))
    rest = [int(n) for iterator in after for batch in iterator for n in batch]
    assert Counter(seen + rest) == Counter(range(SIZE))


def test_same_on_all_refuses_states_that_differ() -> None:
    with pytest.raises(HostStateError, match="differ"):
        apply_host_state(
            sliced(0, 1),
            documents_of([advanced(sliced(0, 2), 1), sliced(1, 2)]),
            same_on_all(),
            (0, 1),
        )


def advanced(iterator: Any, count: int) -> Any:
    for _ in range(count):
        next(iterator)
    return iterator


def test_remap_takes_what_all_have_alike_and_refuses_the_rest() -> None:
    values = [{"it": sliced(i, 2), "epoch": 3, "by": (1, b"x")} for i in range(2)]
    target = {"it": sliced(0, 1), "epoch": 0, "by": ()}
    apply_host_state(target, documents_of(values), smallest_position(), (0, 1))
    assert (target["epoch"], target["by"]) == (3, (1, b"x"))
    values[1]["epoch"] = 4
    with pytest.raises(HostStateError, match=r"\['epoch'\].*different values"):
        apply_host_state(target, documents_of(values), smallest_position(), (0, 1))


@pytest.mark.parametrize(
    "state",
    [
        {"next_index": -1},
        {"next_index": "3"},
        {"next_index": 3, "window": []},
        {"parent": {"next_index": 1}},
        b"{",
        b"[]",
        b"\xff",
        b'{"version": 3}',
        {"index": b"", "data": b""},
        None,
        7,
    ],
    ids=str,
)
def test_move_position_refuses_states_that_it_does_not_know(state: Any) -> None:
    with pytest.raises(Unmovable):
        move_position([state, state], 0, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"shard_index=0", b"shard_index=1"),
        (b"shard_count=2", b"shard_count=4"),
        (b'"worker_count": 0', b'"worker_count": 2'),
        (b"shard_options=", b"no_options"),
    ],
)
def test_move_position_refuses_loaders_of_other_shards(old: bytes, new: bytes) -> None:
    states = [loader(index, 2).get_state() for index in range(2)]
    assert old in states[0]
    changed = (
        states[0].replace(old, new)
        if old != b"shard_options="
        else states[0].replace(b"ShardOptions(shard_index", b"Other(index")
    )
    with pytest.raises(Unmovable):
        move_position([changed, states[1]], 0, 1)


def test_remap_of_ones_own_may_have_iterators_inside() -> None:
    documents = documents_of([{"it": advanced(sliced(i, 2), 2), "n": i} for i in range(2)])

    def first(values: Any, index: int, count: int) -> Any:
        return {"it": values[0]["it"], "n": count}

    target = {"it": sliced(0, 1), "n": 0}
    apply_host_state(target, documents, first, (0, 1))
    assert target["n"] == 1
    assert target["it"].get_state() == {"next_index": 2}
