"""The leaves that were saved against those of the expected state. Pure.

``compare_leaves`` compares a save of this package; ``match_leaves`` a step in storage, which plain
Orbax may have written, and finds the array of each leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emergency_ckpt.core.boxes import volume, whole
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.types import LeafSpec

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 4, 8, 16, 32, 64))
_FLOATS = frozenset(
    {
        *("float16", "bfloat16", "float32", "float64", "float4_e2m1fn"),
        *("float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)
PYTHON_NUMBERS = {
    "Python bool": frozenset({"bool"}),
    "Python int": _INTEGERS,
    "Python float": _FLOATS,
    "Python complex": frozenset({"complex64", "complex128"}),
}
"""Placeholder dtypes of expected Python numbers, and the stored dtypes that each accepts.

Only dtypes of the same kind, so that no value changes on its way to a Python number.
"""


def compare_leaves(expected: Mapping[str, LeafSpec], actual: Iterable[LeafSpec]) -> tuple[str, ...]:
    """Return one line for each leaf that differs, with both values, sorted by path.

    The division of a leaf into boxes is not compared, because any box layout can be restored to any
    other; nor the stored width of a scalar where a Python number is expected: see
    ``PYTHON_NUMBERS``.
    """
    stored: dict[str, LeafSpec] = {}
    doubled: set[str] = set()
    for leaf in actual:
        if stored.setdefault(leaf.path, leaf) != leaf:
            doubled.add(leaf.path)
    lines: list[str] = []
    for path in sorted(expected.keys() | stored.keys()):
        if path in doubled:
            lines.append(f"{path}: stored with two different descriptions")
        elif path not in stored:
            lines.append(f"{path}: expected {_spec_text(expected[path])}, not in the checkpoint")
        elif path not in expected:
            lines.append(
                f"{path}: not in the given state, checkpoint has {_spec_text(stored[path])}"
            )
        else:
            lines.extend(_differences(expected[path], stored[path]))
    return tuple(lines)


def compare_targets(mine: Mapping[str, LeafSpec], first: Mapping[str, LeafSpec]) -> tuple[str, ...]:
    """Return one line for each leaf that two processes ask for in different forms, by path."""
    lines: list[str] = []
    for path in sorted(mine.keys() | first.keys()):
        here, there = mine.get(path), first.get(path)
        if here != there:
            lines.append(f"{path}: {_spec_text(here)} here, {_spec_text(there)} on process 0")
    return tuple(lines)


def _differences(expected: LeafSpec, stored: LeafSpec) -> list[str]:
    """Return at most one line, which names each property that differs."""
    sides: list[tuple[str, str]] = []
    if stored.dtype not in PYTHON_NUMBERS.get(expected.dtype, (expected.dtype,)):
        kind = "a" if expected.dtype in PYTHON_NUMBERS else "dtype"
        sides.append((f"{kind} {expected.dtype}", f"dtype {stored.dtype}"))
    if expected.global_shape != stored.global_shape:
        sides.append((f"shape {expected.global_shape}", f"shape {stored.global_shape}"))
    if expected.key_impl != stored.key_impl:
        sides.append((f"key_impl {expected.key_impl}", f"key_impl {stored.key_impl}"))
    if not sides:
        return []
    want, have = (", ".join(side) for side in zip(*sides, strict=True))
    return [f"{expected.path}: expected {want}, checkpoint has {have}"]


def _spec_text(leaf: LeafSpec | None) -> str:
    if leaf is None:
        return "absent"
    key = f" key {leaf.key_impl}" if leaf.key_impl is not None else ""
    return f"{leaf.dtype}{leaf.global_shape}{key}"


STORED_AS_UINT8 = frozenset(
    {"int1", "uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
)
"""Dtypes that the storage format does not have; stored as one byte for each element."""

_ORBAX_HAS_AS_INT8 = frozenset({"int2", "int4"})
_ORBAX_HAS_AS_UINT8 = frozenset({"uint2", "uint4"})


def stored_name(path: str) -> str:
    """Return Orbax's array name of a leaf; valid when no key of its path contains a slash."""
    return path.replace("/", ".")


def match_leaves(
    expected: Mapping[str, LeafSpec],
    stored: Mapping[str, tuple[LeafSpec, StoredArray]],
    recorded: tuple[LeafSpec, ...] | None,
) -> tuple[dict[str, StoredArray], tuple[str, ...]]:
    """Return the array of each leaf with elements, and one line for each leaf that differs.

    Args:
      stored: the storage format's description of each array. The format has neither zero-size
        arrays nor key implementations, and stores integers of less than a byte as eight-bit ones.
      recorded: all leaves as they were saved; None without a record.
    """
    by_name = {array.full_name: (spec, array) for spec, array in stored.values()}
    arrays: dict[str, StoredArray] = {}
    described: list[LeafSpec] = []
    used: set[str] = set()
    for path, leaf in expected.items():
        spec, array = stored.get(path) or by_name.get(stored_name(path), (None, None))
        if spec is None or array is None:
            if volume(whole(leaf.global_shape)) == 0:
                described.append(leaf)
            continue
        used.add(array.full_name)
        arrays[path] = array
        holds = _holds(spec.dtype, leaf.dtype, is_recorded=recorded is not None)
        dtype = leaf.dtype if holds else spec.dtype
        described.append(LeafSpec(path, dtype, spec.global_shape, leaf.key_impl))
    described += [spec for spec, array in stored.values() if array.full_name not in used]
    mismatches = compare_leaves(expected, described)
    if recorded is not None:
        # The record is exact; the description is only checked for contradictions.
        mismatches = compare_leaves(expected, recorded) or mismatches
    return arrays, mismatches


def _holds(stored: str, expected: str, *, is_recorded: bool) -> bool:
    """Return whether ``stored`` holds the values of ``expected``.

    ``is_recorded``: the record gives the dtype of the bytes. Without it only values can be
    compared.
    """
    return (
        stored == expected
        or (stored == "int8" and expected in _ORBAX_HAS_AS_INT8)
        or (stored == "uint8" and expected in _ORBAX_HAS_AS_UINT8)
        or (stored == "uint8" and is_recorded and expected in STORED_AS_UINT8)
    )
