"""Whether a checkpoint has the leaves that a state expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emergency_ckpt.types import LeafSpec


def compare_leaves(expected: Mapping[str, LeafSpec], found: Iterable[LeafSpec]) -> tuple[str, ...]:
    """One line for each leaf that differs, with both values, sorted by path; empty when equal.

    How a leaf is cut into boxes is no part of it: any box layout can be restored to any other.
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
            lines.append(f"{path}: expected {_spec(expected[path])}, not in the checkpoint")
        elif path not in expected:
            lines.append(f"{path}: not in the given state, checkpoint has {_spec(stored[path])}")
        else:
            lines.extend(_differences(expected[path], stored[path]))
    return tuple(lines)


def _differences(expected: LeafSpec, stored: LeafSpec) -> list[str]:
    """At most one line; it names each property that differs."""
    sides: list[tuple[str, str]] = []
    if expected.dtype != stored.dtype:
        sides.append((f"dtype {expected.dtype}", f"dtype {stored.dtype}"))
    if expected.global_shape != stored.global_shape:
        sides.append((f"shape {expected.global_shape}", f"shape {stored.global_shape}"))
    if expected.key_impl != stored.key_impl:
        sides.append((f"key_impl {expected.key_impl}", f"key_impl {stored.key_impl}"))
    if not sides:
        return []
    want, have = (", ".join(side) for side in zip(*sides, strict=True))
    return [f"{expected.path}: expected {want}, checkpoint has {have}"]


def _spec(leaf: LeafSpec) -> str:
    key = f" key {leaf.key_impl}" if leaf.key_impl is not None else ""
    return f"{leaf.dtype}{leaf.global_shape}{key}"
