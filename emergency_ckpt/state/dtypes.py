"""Conversion between the names of element types in manifests and numpy dtypes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from emergency_ckpt.errors import CorruptData

PACKED_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
"""Elements of less than a byte: packed on devices; one byte each in a snapshot."""

ValuePattern = tuple[int, int, int]
"""(width in bytes, mask, match): values with ``value & mask == match``; width 0: none."""

NO_VALUES: ValuePattern = (0, 0, 0)
_DOUBLE = (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000)
_SINGLE = (4, 0x7F80_0000, 0x7F80_0000)
_NEGATIVE_ZERO = (1, 0xFF, 0x80)  # the only NaN of types without infinities and without -0
_NON_FINITE: dict[str, ValuePattern] = {
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
    "float32": _SINGLE,
    "complex64": _SINGLE,
    "float16": (2, 0x7C00, 0x7C00),
    "bfloat16": (2, 0x7F80, 0x7F80),
    "float8_e3m4": (1, 0x70, 0x70),
    "float8_e4m3": (1, 0x78, 0x78),
    "float8_e5m2": (1, 0x7C, 0x7C),
    "float8_e4m3fn": (1, 0x7F, 0x7F),
    "float8_e4m3b11fnuz": _NEGATIVE_ZERO,
    "float8_e4m3fnuz": _NEGATIVE_ZERO,
    "float8_e5m2fnuz": _NEGATIVE_ZERO,
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
}

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}", re.ASCII)
"""Of a single type: numpy evaluates other strings as lists of fields (SyntaxError, ValueError)."""


@lru_cache(maxsize=256)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the numpy dtype called ``name``; CorruptData for a name that is no fixed-size type."""
    if not _NAME.fullmatch(name):
        raise CorruptData("decode", f"dtype {name[:64]!r}", "no such element type")
    # ml_dtypes first, because numpy may define "int4" differently one day.
    extension = getattr(ml_dtypes, name, None)
    try:
        dtype = np.dtype(extension if isinstance(extension, type) else name)
    except (TypeError, ValueError) as error:
        raise CorruptData("decode", f"dtype {name!r}", "no such element type") from error
    if dtype.hasobject or dtype.itemsize == 0 or dtype.names is not None:
        raise CorruptData("decode", f"dtype {name!r}", "not a type of fixed size")
    return dtype


def non_finite_pattern(name: str) -> ValuePattern:
    """Return by which bits NaN and infinity of the dtype called ``name`` are told from numbers.

    A complex number counts as two. Types that have neither have the pattern of no values.
    """
    return _NON_FINITE.get(name, NO_VALUES)
