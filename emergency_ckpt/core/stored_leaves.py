"""Whether what storage describes is the expected state, and where each leaf of it lies. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from emergency_ckpt.core.boxes import volume, whole
from emergency_ckpt.core.leaf_comparison import compare_leaves
from emergency_ckpt.core.storage_read import StoredArray
from emergency_ckpt.types import LeafSpec

_STORED_AS_INT8 = frozenset({"int2", "int4"})
_STORED_AS_UINT8 = frozenset({"uint2", "uint4"})


def stored_name(path: str) -> str:
    """The array that Orbax keeps a leaf in, where no key of the leaf's path has a slash itself."""
    return path.replace("/", ".")


def match_leaves(
    expected: Mapping[str, LeafSpec],
    stored: Mapping[str, tuple[LeafSpec, StoredArray]],
    recorded: tuple[LeafSpec, ...] | None,
) -> tuple[dict[str, StoredArray], tuple[str, ...]]:
    """Where each leaf with elements lies, and one line for each leaf that differs.

    Args:
      stored: what the storage format says of each array. It knows neither zero-size arrays nor
        key implementations, and has four-bit integers as eight-bit ones.
      recorded: all leaves as they were saved; None when nobody recorded them.
    """
    by_name = {array.name: (spec, array) for spec, array in stored.values()}
    found: dict[str, StoredArray] = {}
    described: list[LeafSpec] = []
    used: set[str] = set()
    for path, leaf in expected.items():
        spec, array = stored.get(path) or by_name.get(stored_name(path), (None, None))
        if spec is None or array is None:
            if volume(whole(leaf.global_shape)) == 0:
                described.append(leaf)
            continue
        used.add(array.name)
        found[path] = array
        dtype = leaf.dtype if _holds(spec.dtype, leaf.dtype) else spec.dtype
        described.append(LeafSpec(path, dtype, spec.global_shape, leaf.key_impl))
    described += [spec for spec, array in stored.values() if array.name not in used]
    mismatches = compare_leaves(expected, described)
    if recorded is not None:
        # The record is exact; the description must only not contradict it.
        mismatches = compare_leaves(expected, recorded) or mismatches
    return found, mismatches


def _holds(stored: str, expected: str) -> bool:
    """Whether the bytes of one are those of the other."""
    return (
        stored == expected
        or (stored == "int8" and expected in _STORED_AS_INT8)
        or (stored == "uint8" and expected in _STORED_AS_UINT8)
    )
