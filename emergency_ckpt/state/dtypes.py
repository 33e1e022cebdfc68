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
