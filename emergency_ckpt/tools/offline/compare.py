"""The differences of two steps, one box at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.tier import StepReader
from emergency_ckpt.types import LeafSpec

_ELEMENTS_AT_ONCE = 1 << 22
_NONE = LeafSpec("", "", ())


class LeafDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leaf that differs.

    Attributes:
      kind: "only_in_a", "only_in_b", "dtype", "shape", "key_impl" or "values".
      a, b: the two sides of a difference of structure.
      elements: number of elements with different bits, of ``of`` elements.
      largest: largest absolute difference of numbers that both sides have; null when not numbers.
      not_numbers: elements that are NaN, or an infinity, on one side alone.
    """

    path: str
    kind: str
    a: str = ""
    b: str = ""
    elements: int = 0
    of: int = 0
    largest: float | None = None
    not_numbers: int = 0


def differences(
    a: StepReader, b: StepReader, progress: Callable[[int], None]
) -> Iterator[LeafDifference]:
    """Yield every leaf that differs, by path. Memory: a box of each side.

    ``progress``: called with the bytes that were compared since its last call.
    """
    for path in sorted(a.leaves.keys() | b.leaves.keys()):
        left, right = a.leaves.get(path), b.leaves.get(path)
        if (left is None or right is None) and 0 in (left or right or _NONE).global_shape:
            continue  # Orbax cannot hold arrays without elements
        if right is None:
            yield LeafDifference(path, "only_in_a", a=_text(left))
        elif left is None:
            yield LeafDifference(path, "only_in_b", b=_text(right))
        else:
            found = _structure(left, right) or _values(a, b, path, progress)
            if found.kind != "values" or found.elements:
                yield found


def _text(leaf: LeafSpec | None) -> str:
    return f"{leaf.dtype}{list(leaf.global_shape)}" if leaf else ""


def _structure(a: LeafSpec, b: LeafSpec) -> LeafDifference | None:
    if a.global_shape != b.global_shape:
        return LeafDifference(a.path, "shape", str(a.global_shape), str(b.global_shape))
    if a.dtype != b.dtype:
        return LeafDifference(a.path, "dtype", a.dtype, b.dtype)
    if a.key_impl != b.key_impl and None not in (a.key_impl, b.key_impl):
        # Orbax's description of a step has no key implementations.
        return LeafDifference(a.path, "key_impl", str(a.key_impl), str(b.key_impl))
    return None


def _values(
    a: StepReader, b: StepReader, path: str, progress: Callable[[int], None]
) -> LeafDifference:
    elements = total = not_numbers = 0
    largest: float | None = None
    spec = a.leaves[path]
    bits = f"u{dtype_named(spec.dtype).itemsize}"
    for box in a.boxes(path):
        left, right = a.read(path, box).reshape(-1), b.read(path, box).reshape(-1)
        for start in range(0, left.size, _ELEMENTS_AT_ONCE):
            x, y = left[start : start + _ELEMENTS_AT_ONCE], right[start : start + _ELEMENTS_AT_ONCE]
            differ = _bits_differ(x, y, bits)
            count = int(np.count_nonzero(differ))
            if count:
                elements += count
                most, strange = largest_difference(x[differ], y[differ])
                not_numbers += strange
                if most is not None:
                    largest = most if largest is None else max(largest, most)
        total += left.size
        progress(left.nbytes)
    return LeafDifference(
        path, "values", elements=elements, of=total, largest=largest, not_numbers=not_numbers
    )


def _bits_differ(x: npt.NDArray[Any], y: npt.NDArray[Any], bits: str) -> npt.NDArray[np.bool_]:
    if bits == "u16":  # complex128
        return (x.view("u8").reshape(-1, 2) != y.view("u8").reshape(-1, 2)).any(axis=1)
    return x.view(bits) != y.view(bits)


def largest_difference(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[float | None, int]:
    """Return the largest absolute difference of one-dimensional arrays of one dtype.

    And the number of elements that are NaN or infinite on one side alone, which it leaves out, as
    it does NaNs on both sides. None without numbers to compare.
    """
    if x.dtype == np.bool_:
        return 1.0 if (x != y).any() else None, 0
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        # Exact where float64 is not: of two integers the larger less the smaller fits in u8.
        high, low = np.maximum(x, y).view("u8"), np.minimum(x, y).view("u8")
        return (float((high - low).max()), 0) if x.size else (None, 0)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # a NaN of fewer bits
        left, right = x.astype(wide), y.astype(wide)
    numbers = np.isfinite(left) & np.isfinite(right)
    same_kind = (np.isnan(left) & np.isnan(right)) | (left == right)
    strange = int(np.count_nonzero(~numbers & ~same_kind))
    if not numbers.any():
        return None, strange
    return float(np.abs(left[numbers] - right[numbers]).max()), strange
