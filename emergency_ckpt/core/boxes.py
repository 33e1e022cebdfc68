"""Arithmetic on index boxes: what a wanted shard needs of stored ones, and chunks of arrays."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import isqrt, prod
from operator import itemgetter
from typing import NamedTuple

from emergency_ckpt.types import Box

CHUNK_BYTES = 64 << 20
"""Bytes that a chunk should have at most, since a reader of a part of it reads all of it."""

_MOST_TIMES = 8
"""A division into more chunks than so many times the fewest would make them too small."""


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of the array that the box cuts out."""
    return tuple(max(0, stop - start) for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements: 1 for a scalar's box ``()``, 0 when a range is empty."""
    return prod(shape_of(box))


def is_empty(box: Box) -> bool:
    """Return whether the box has no element. A scalar's box has one."""
    for start, stop in box:  # noqa: SIM110  a plain loop: planning asks this millions of times
        if start >= stop:
            return True
    return False


def whole(global_shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return tuple((0, size) for size in global_shape)


def describe(box: Box) -> str:
    """Return the box in index notation, such as ``[0:4, 0:8]``."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box; None when the boxes share no element or differ in rank."""
    if len(a) != len(b):
        return None
    common: list[tuple[int, int]] = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of the box in an array."""
    return tuple(slice(start, stop) for start, stop in box)


def split(
    box: Box, chunk_shape: Sequence[int], item_bytes: int, limit_bytes: int | None
) -> list[Box]:
    """Return ``box`` in halves along chunk borders until each is within the limit or one chunk."""
    if limit_bytes is None or volume(box) * item_bytes <= limit_bytes:
        return [box]
    for axis, ((start, stop), chunk) in enumerate(zip(box, chunk_shape, strict=True)):
        step = max(chunk, 1)  # an axis without elements has chunks without any
        chunks = -(-(stop - start) // step)
        if chunks > 1:
            middle = start + chunks // 2 * step
            halves = (
                (*box[:axis], span, *box[axis + 1 :]) for span in ((start, middle), (middle, stop))
            )
            return [
                piece
                for half in halves
                for piece in split(half, chunk_shape, item_bytes, limit_bytes)
            ]
    return [box]


def relative(box: Box, origin: Box) -> Box:
    """Return ``box`` as index ranges inside ``origin``. Both have the same rank."""
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True)
    )


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that make up ``box`` without ``hole``."""
    common = intersect(box, hole)
    if common is None:
        return [box] if volume(box) else []
    rest: list[Box] = []
    core = list(box)
    for axis, (start, stop) in enumerate(common):
        low, high = core[axis]
        if low < start:
            rest.append((*core[:axis], (low, start), *core[axis + 1 :]))
        if stop < high:
            rest.append((*core[:axis], (stop, high), *core[axis + 1 :]))
        core[axis] = (start, stop)
    return rest


class Portion(NamedTuple):
    """A part of a target, and the box that supplies its elements."""

    source: Box
    part: Box


def divide(target: Box, boxes: Iterable[Box]) -> tuple[list[Portion], list[Box]]:
    """Divide ``target`` over ``boxes``, which may overlap; each element comes from one of them.

    A box supplies the elements that the boxes before it do not have; a box that adds nothing is not
    used.

    Returns (portions, parts of ``target`` that no box holds). The parts are disjoint and make up
    ``target``. An empty ``target`` has none.
    """
    left = [target] if volume(target) else []
    portions: list[Portion] = []
    for box in boxes:
        if not left:
            break
        parts = [part for part in (intersect(piece, box) for piece in left) if part is not None]
        if parts:
            portions += [Portion(box, part) for part in parts]
            left = [rest for piece in left for rest in subtract(piece, box)]
    return portions, left


def covers(target: Box, boxes: Iterable[Box]) -> bool:
    """Return whether the union of ``boxes`` holds every element of ``target``."""
    return not divide(target, boxes)[1]


class BoxIndex:
    """Finds the boxes that touch a target without comparing all of them.

    The boxes of one array under one sharding form a grid, so the ranges of each axis are sorted
    once and looked up by bisection. Boxes that form no grid are looked at one by one.
    """

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._boxes = sorted({box for box in boxes if volume(box)})
        self._known = frozenset(self._boxes)
        self._axes = _grid_axes(self._boxes)

    @property
    def is_disjoint(self) -> bool:
        """True when the boxes form a grid, so that no two of them share an element."""
        return self._axes is not None

    def touching(self, target: Box) -> list[Box]:
        """Return the boxes that share an element with ``target``, sorted."""
        cells = self._cells(target)
        if cells is None:
            return [box for box in self._boxes if intersect(box, target) is not None]
        return [cell for cell in product(*cells) if cell in self._known]

    def _cells(self, target: Box) -> list[list[tuple[int, int]]] | None:
        """Return the grid's ranges that touch the target, per axis; None when a scan is cheaper."""
        if self._axes is None or len(self._axes) != len(target):
            return None
        if not volume(target):
            return [[]]
        cells: list[list[tuple[int, int]]] = []
        for ranges, (start, stop) in zip(self._axes, target, strict=True):
            first = bisect_right(ranges, start, key=itemgetter(1))
            cells.append(ranges[first : bisect_left(ranges, stop, key=itemgetter(0))])
        return cells if prod(map(len, cells)) <= len(self._boxes) else None


def _grid_axes(boxes: Sequence[Box]) -> list[list[tuple[int, int]]] | None:
    """Return the sorted, disjoint ranges of each axis; None when ranges overlap or ranks differ."""
    if len({len(box) for box in boxes}) != 1:
        return None
    axes = [sorted(set(spans)) for spans in zip(*boxes, strict=True)]
    for spans in axes:
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            return None
    return axes


def chunk_shape(
    part: Sequence[int], item_bytes: int, limit_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the shape of the chunks of an array whose parts have the shape ``part``.

    It divides ``part`` evenly along its first axes, so that the values of a chunk lie together in
    a part. It is ``part`` itself where that has no such divisor.
    """
    whole = tuple(max(1, size) for size in part)
    chunk = list(whole)
    for axis, size in enumerate(whole):
        row_bytes = prod(whole[axis + 1 :]) * item_bytes
        if row_bytes * size <= limit_bytes:
            break
        chunk[axis] = _largest_divisor(size, max(1, limit_bytes // row_bytes))
        if row_bytes <= limit_bytes:
            break
    fewest = -(-prod(whole) * item_bytes // limit_bytes)
    count = prod(whole) // prod(chunk)
    return tuple(chunk) if count <= _MOST_TIMES * fewest else whole


def _largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is not above ``most``."""
    if size <= most:
        return size
    small = [divisor for divisor in range(1, isqrt(size) + 1) if size % divisor == 0]
    return max(divisor for low in small for divisor in (low, size // low) if divisor <= most)
