"""Comparison of a stored step with the expected state, and the array of each leaf. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from emergency_ckpt.core.boxes import volume, whole
from emergency_ckpt.core.restore.leaves.leaf_comparison import compare_leaves
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.types import LeafSpec

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
      stored: the storage format's description of each array. It has neither zero-size arrays nor
        key implementations, and stores integers of less than a byte as eight-bit ones.
      recorded: all leaves as they were saved; None without a record.
    """
    by_name = {array.full_name: (spec, array) for spec, array in stored.values()}
    found: dict[str, StoredArray] = {}
    described: list[LeafSpec] = []
    used: set[str] = set()
    for path, leaf in expected.items():
        spec, array = stored.get(path) or by_name.get(stored_name(path), (None, None))
        if spec is None or array is None:
            if volume(whole(leaf.global_shape)) == 0:
                described.append(leaf)
            continue
        used.add(array.full_name)
        found[path] = array
        holds = _holds(spec.dtype, leaf.dtype, is_recorded=recorded is not None)
        dtype = leaf.dtype if holds else spec.dtype
        described.append(LeafSpec(path, dtype, spec.global_shape, leaf.key_impl))
    described += [spec for spec, array in stored.values() if array.full_name not in used]
    mismatches = compare_leaves(expected, described)
    if recorded is not None:
        # The record is exact; the description is only checked for contradictions.
        mismatches = compare_leaves(expected, recorded) or mismatches
    return found, mismatches


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
