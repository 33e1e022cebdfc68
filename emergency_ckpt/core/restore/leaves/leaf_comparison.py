"""Comparison of a checkpoint's leaves with those of the expected state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def compare_leaves(expected: Mapping[str, LeafSpec], found: Iterable[LeafSpec]) -> tuple[str, ...]:
    """Return one line for each leaf that differs, with both values, sorted by path.

    The division of a leaf into boxes is not compared, because any box layout can be restored to any
    other; nor the stored width of a scalar where a Python number is expected: see
    ``PYTHON_NUMBERS``.
    """
    stored: dict[str, LeafSpec] = {}
    doubled: set[str] = set()
    for leaf in found:
        if stored.setdefault(leaf.path, leaf) != leaf:
            doubled.add(leaf.path)
    lines: list[str] = []
    for path in sorted(expected.keys() | stored.keys()):
        if path in doubled:
            lines.append(f"{path}: stored with two different descriptions")
        elif path not in stored:
            lines.append(f"{path}: expected {spec_text(expected[path])}, not in the checkpoint")
        elif path not in expected:
            lines.append(
                f"{path}: not in the given state, checkpoint has {spec_text(stored[path])}"
            )
        else:
            lines.extend(_differences(expected[path], stored[path]))
    return tuple(lines)


def compare_targets(mine: Mapping[str, LeafSpec], first: Mapping[str, LeafSpec]) -> tuple[str, ...]:
    """Return one line for each leaf that two processes ask for in different forms, by path."""
    return tuple(
        f"{path}: {_side(mine.get(path))} here, {_side(first.get(path))} on process 0"
        for path in sorted(mine.keys() | first.keys())
        if mine.get(path) != first.get(path)
    )


def _side(leaf: LeafSpec | None) -> str:
    return "absent" if leaf is None else spec_text(leaf)


def _differences(expected: LeafSpec, stored: LeafSpec) -> list[str]:
    """Return at most one line, which names each property that differs."""
    sides: list[tuple[str, str]] = []
    if stored.dtype not in PYTHON_NUMBERS.get(expected.dtype, (expected.dtype,)):
        sides.append((_dtype(expected), f"dtype {stored.dtype}"))
    if expected.global_shape != stored.global_shape:
        sides.append((f"shape {expected.global_shape}", f"shape {stored.global_shape}"))
    if expected.key_impl != stored.key_impl:
        sides.append((f"key_impl {expected.key_impl}", f"key_impl {stored.key_impl}"))
    if not sides:
        return []
    want, have = (", ".join(side) for side in zip(*sides, strict=True))
    return [f"{expected.path}: expected {want}, checkpoint has {have}"]


def _dtype(leaf: LeafSpec) -> str:
    return f"a {leaf.dtype}" if leaf.dtype in PYTHON_NUMBERS else f"dtype {leaf.dtype}"


def spec_text(leaf: LeafSpec) -> str:
    """Return dtype, shape and kind of keys of a leaf."""
    key = f" key {leaf.key_impl}" if leaf.key_impl is not None else ""
    return f"{leaf.dtype}{leaf.global_shape}{key}"
