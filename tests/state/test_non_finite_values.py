"""The bits by which values that are not finite are told from numbers, of each dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.state.dtypes import dtype_named, non_finite_pattern

BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(name: str) -> np.ndarray:
    """Return bits of values: all of one or two bytes, else the edges of the exponent."""
    width = dtype_named(name).itemsize
    if width <= 2:
        return np.arange(1 << (8 * width), dtype=BYTES[width])
    edges = [0.0, -0.0, 1.5, np.nan, -np.nan, np.inf, -np.inf]
    info = np.finfo(name)
    values = np.array([*edges, info.max, info.min, info.tiny, info.smallest_subnormal], name)
    return values.view(BYTES[width])


@pytest.mark.parametrize("name", sorted(DTYPE_ITEM_BYTES))
def test_pattern_fits_exactly_what_is_not_finite(name: str) -> None:
    width, mask, match = non_finite_pattern(name)
    if not name.startswith(("float", "bfloat")):
        assert width == 0 or name.startswith("complex")
        return
    with np.errstate(invalid="ignore"):
        if name.startswith(("float4_", "float6_")):
            assert width == 0
            return
        bits = bits_of(name)
        expected = ~np.isfinite(bits.view(dtype_named(name)).astype(np.float64))
    assert width == bits.itemsize
    assert (((bits & bits.dtype.type(mask)) == match) == expected).all()


@pytest.mark.parametrize(("name", "part"), [("complex64", "float32"), ("complex128", "float64")])
def test_complex_numbers_are_two(name: str, part: str) -> None:
    assert non_finite_pattern(name) == non_finite_pattern(part)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
def test_types_without_such_values_have_no_pattern(name: str) -> None:
    every = np.arange(64, dtype=np.uint8).view(getattr(ml_dtypes, name))
    assert np.isfinite(every.astype(np.float32)).all()
    assert non_finite_pattern(name) == (0, 0, 0)
