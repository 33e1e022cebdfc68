"""The rules for leaves and boxes that come from a file, in RAM as in storage. Pure.

The pages of both formats have these rules. Every check raises CorruptData alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emergency_ckpt.core.limits import (
    MAX_DIMENSIONS,
    MAX_INT,
    MAX_LABEL_CHARS,
    MAX_LEAVES,
    MAX_PATH_CHARS,
)
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, state_size_bytes
from emergency_ckpt.core.wording import short_text
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.types import Box, LeafSpec

_MAX_CRC = 0xFFFFFFFF


def check_leaves(leaves: Sequence[LeafSpec], target: str) -> None:
    """Check all leaves of the state in the file ``target``."""
    if len(leaves) > MAX_LEAVES:
        raise corrupt(target, "too many leaves", MAX_LEAVES, len(leaves))
    for spec in leaves:
        _check_leaf(spec, target)


def _check_leaf(spec: LeafSpec, target: str) -> None:
    shape, impl = spec.global_shape, spec.key_impl
    if len(spec.path) > MAX_PATH_CHARS:
        raise corrupt(target, "leaf path too long", MAX_PATH_CHARS, len(spec.path))
    if spec.dtype not in DTYPE_ITEM_BYTES:
        raise corrupt(target, "unknown dtype", None, spec.dtype)
    if len(shape) > MAX_DIMENSIONS:
        raise corrupt(target, "too many dimensions", MAX_DIMENSIONS, len(shape))
    if shape and not (min(shape) >= 0 and max(shape) <= MAX_INT):
        raise corrupt(target, "dimension out of bounds", None, shape)
    if impl is not None and len(impl) > MAX_LABEL_CHARS:
        raise corrupt(target, "key_impl too long", MAX_LABEL_CHARS, len(impl))


def check_state_size(leaves: Iterable[LeafSpec], target: str) -> None:
    """Check the size of a whole state, whose leaves were checked."""
    size_bytes = state_size_bytes(leaves)
    if size_bytes > MAX_INT:
        raise corrupt(target, "state too large", MAX_INT, size_bytes)


def check_box(spec: LeafSpec, box: Box, target: str) -> None:
    """Check that ``box`` is a part of a leaf."""
    if len(box) != len(spec.global_shape):
        raise corrupt(target, "box of another rank", len(spec.global_shape), len(box))
    for (start, stop), dim in zip(box, spec.global_shape, strict=True):
        if not 0 <= start <= stop <= dim:
            raise corrupt(target, "box is not inside the global shape", spec.global_shape, box)


def check_crc(crc32c: int, target: str) -> None:
    """Check that a number is a CRC32C."""
    if not 0 <= crc32c <= _MAX_CRC:
        raise corrupt(target, "CRC32C out of bounds", None, crc32c)


def corrupt(target: str, problem: str, expected: object, actual: object) -> CorruptData:
    """Return the error about ``target``, whose values may be of any length."""
    expected = None if expected is None else short_text(expected)
    return CorruptData("decode", target, problem, expected=expected, actual=short_text(actual))
