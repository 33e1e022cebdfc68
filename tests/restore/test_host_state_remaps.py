"""Grain in a job of another size, by the recipes of the docs: nothing is left out."""

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
from readme_blocks import recipes_of

from emergency_ckpt.restore.host_state import apply_host_state
from emergency_ckpt.state import host_state
from emergency_ckpt.types import SaveId

SIZE = 48
SAVE = SaveId(3, "life", "run")
RECIPES = recipes_of("grain_other_size")


def sliced(index: int, count: int) -> Any:
    return iter(grain.MapDataset.range(SIZE).shuffle(seed=1)[index::count].to_iter_dataset())


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
    documents = documents_of([{"data": iterator} for iterator in before])
    after: list[Any] = []
    for index in range(count):
        target = {"data": build(index, count)}
        apply_host_state(target, documents, remap, (index, count))
        after.append(target["data"])
    return seen, after


@pytest.mark.dear
@settings(max_examples=15)
@given(former=st.integers(1, 6), count=st.integers(1, 6), rounds=st.integers(0, 6))
def test_sliced_recipe_leaves_nothing_out(former: int, count: int, rounds: int) -> None:
    seen, after = moved(sliced, former, count, RECIPES.sliced, rounds=rounds)
    rest = [int(value) for iterator in after for value in islice(iterator, SIZE)]
    times = Counter(seen + rest)
    assert set(times) == set(range(SIZE))
    again = [number for number, found in times.items() if found > 1]
    assert len(again) < count
    assert max(times.values()) <= 2


def test_sliced_recipe_goes_on_with_the_process_behind() -> None:
    states = [{"data": {"next_index": position}, "n": 1} for position in (6, 4, 5)]
    assert RECIPES.sliced(states, 0, 2) == {"data": {"next_index": 6}, "n": 1}
    with pytest.raises(ValueError, match="no position"):
        RECIPES.sliced([{"data": {"parent": 3}}], 0, 2)


def elastic(index: int, count: int) -> Any:
    data = grain.MapDataset.range(SIZE).shuffle(seed=1)
    return iter(ElasticIterator(data, 12, grain.ShardOptions(index, count)))


def test_elastic_recipe_is_exact() -> None:
    before = [elastic(index, 2) for index in range(2)]
    seen = [int(n) for iterator in before for n in next(iterator)]
    documents = documents_of([{"data": iterator} for iterator in before])
    after = [elastic(index, 3) for index in range(3)]
    for index, iterator in enumerate(after):
        apply_host_state({"data": iterator}, documents, RECIPES.elastic, (index, 3))
    rest = [int(n) for iterator in after for batch in iterator for n in batch]
    assert Counter(seen + rest) == Counter(range(SIZE))


def test_elastic_recipe_refuses_states_that_differ() -> None:
    with pytest.raises(ValueError, match="differ"):
        RECIPES.elastic([{"data": b"a"}, {"data": b"b"}], 0, 1)


def advanced(iterator: Any, count: int) -> Any:
    for _ in range(count):
        next(iterator)
    return iterator


def test_remap_of_ones_own_may_have_iterators_inside() -> None:
    documents = documents_of([{"it": advanced(sliced(i, 2), 2), "n": i} for i in range(2)])

    def first(values: Any, index: int, count: int) -> Any:
        return {"it": values[0]["it"], "n": count}

    target = {"it": sliced(0, 1), "n": 0}
    apply_host_state(target, documents, first, (0, 1))
    assert target["n"] == 1
    assert target["it"].get_state() == {"next_index": 2}
