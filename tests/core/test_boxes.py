"""Box arithmetic, against sets of elements."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.boxes import (
    BoxIndex,
    covers,
    describe,
    divide,
    intersect,
    is_empty,
    relative,
    split,
    subtract,
    volume,
    whole,
)
from emergency_ckpt.types import Box

SPAN = st.tuples(st.integers(0, 5), st.integers(0, 5))


def boxes(rank: int) -> st.SearchStrategy[Box]:
    return st.tuples(*[SPAN] * rank)


BOX = st.integers(0, 3).flatmap(boxes)
TWO = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))
MANY = st.integers(0, 2).flatmap(lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank))))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in box)))


@given(BOX)
def test_volume_counts_elements(box: Box) -> None:
    assert volume(box) == len(elements(box))
    assert is_empty(box) == (not elements(box))


@given(TWO)
def test_intersect_is_the_common_part(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = intersect(a, b)
    assert (elements(common) if common is not None else set()) == elements(a) & elements(b)


@given(BOX, st.lists(st.integers(0, 6), min_size=3, max_size=3), st.integers(0, 130))
def test_split_gives_whole_chunks_up_to_the_limit(box: Box, chunks: list[int], limit: int) -> None:
    chunk_shape = chunks[: len(box)]
    pieces = split(box, chunk_shape, 1, limit)
    assert sum(map(volume, pieces)) == len(elements(box))
    assert set[tuple[int, ...]]().union(*map(elements, pieces)) == elements(box)
    for piece in pieces:
        for (start, _), (first, _), chunk in zip(piece, box, chunk_shape, strict=True):
            assert (start - first) % max(chunk, 1) == 0
        sizes = [stop - start for start, stop in piece]
        is_one_chunk = all(n <= max(chunk, 1) for n, chunk in zip(sizes, chunk_shape, strict=True))
        assert volume(piece) <= limit or is_one_chunk
    assert split(box, chunk_shape, 1, None) == [box]


@given(TWO)
def test_subtract_leaves_disjoint_rest(pair: tuple[Box, Box]) -> None:
    box, hole = pair
    parts = [elements(part) for part in subtract(box, hole)]
    assert sum(map(len, parts)) == len(elements(box) - elements(hole))
    assert set().union(*parts) == elements(box) - elements(hole)


@given(MANY)
def test_divide_takes_each_element_from_one_box(case: tuple[Box, list[Box]]) -> None:
    target, boxes = case
    portions, left = divide(target, boxes)
    parts = [*(portion.part for portion in portions), *left]
    assert sum(map(volume, parts)) == volume(target)
    assert set().union(*map(elements, parts)) == elements(target)
    for portion in portions:
        assert elements(portion.part) <= elements(portion.source)
        assert portion.source in boxes
    held = set().union(*map(elements, boxes))
    assert set().union(*map(elements, left)) == elements(target) - held


@given(MANY)
def test_covers_is_exact(case: tuple[Box, list[Box]]) -> None:
    target, candidates = case
    held = set().union(*map(elements, candidates))
    assert covers(target, candidates) == (elements(target) <= held)


@given(MANY)
def test_index_finds_what_a_scan_finds(case: tuple[Box, list[Box]]) -> None:
    target, candidates = case
    scanned = {box for box in candidates if intersect(box, target) is not None}
    assert BoxIndex(candidates).touching(target) == sorted(scanned)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_index_of_a_grid_finds_what_a_scan_finds(counts: list[int], data: st.DataObject) -> None:
    axes = [[(2 * i, 2 * i + 2) for i in range(count)] for count in counts]
    cells = data.draw(st.sets(st.sampled_from(list(product(*axes)))))
    target = data.draw(boxes(len(counts)))
    scanned = {box for box in cells if intersect(box, target) is not None}
    assert BoxIndex(cells).touching(target) == sorted(scanned)


def test_boxes_of_different_rank_share_nothing() -> None:
    assert intersect(((0, 2),), ()) is None
    assert BoxIndex([((0, 2),), ((0, 2), (0, 2))]).touching(((1, 2),)) == [((0, 2),)]


def test_scalars_have_one_element() -> None:
    assert intersect((), ()) == ()
    assert covers((), [()])
    assert not covers((), [])
    assert BoxIndex([()]).touching(()) == [()]


def test_words_and_shapes() -> None:
    assert describe(((0, 4), (2, 3))) == "[0:4, 2:3]"
    assert whole((4, 2)) == ((0, 4), (0, 2))
    assert relative(((2, 4),), ((1, 6),)) == ((1, 3),)
