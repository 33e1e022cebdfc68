"""The training state of the soak as a function of (step, life), by numpy alone.

``life`` is the number of the life that computed the step. Two lives compute different bytes at one
step, as two timelines would, so that a mixture of them, or a step that was rolled back, shows.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Leaf(NamedTuple):
    """One leaf: its shape, its dtype, and the axis that ``fsdp`` divides, or None."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None


# Axes that fsdp divides are multiples of 1, 2, 3 and 4.
LEAVES: Mapping[str, Leaf] = {
    "life": Leaf((), "int32"),
    "weights": Leaf((96, 33), "float32", 0),
    "columns": Leaf((5, 48), "bfloat16", 1),
    "flags": Leaf((24,), "bool", 0),
    "table": Leaf((7, 3), "uint8"),
    "none": Leaf((0, 4), "float32"),
}


def kind_of(name: str) -> np.dtype[Any]:
    dtype = LEAVES[name].dtype
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


@functools.lru_cache(maxsize=512)
def leaf(name: str, step: int, life: int) -> np.ndarray:
    """The whole array: random bits of the step and the life; read-only."""
    shape, kind = LEAVES[name].shape, kind_of(name)
    if name == "life":
        value = np.array(life, kind)
    else:
        seed = [step, life, *name.encode()]
        count = int(np.prod(shape)) * kind.itemsize
        bits = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
        value = (bits & 1 if LEAVES[name].dtype == "bool" else bits).view(kind).reshape(shape)
    value.setflags(write=False)
    return value


def part(name: str, step: int, life: int, box: tuple[tuple[int, int], ...]) -> bytes:
    """The bytes of one box of a leaf, in row-major order."""
    return leaf(name, step, life)[tuple(slice(*side) for side in box)].tobytes()


def digest(parts: Mapping[str, Mapping[str, bytes]]) -> str:
    """The digest of what a process has: for each leaf its boxes, as text, and their bytes."""
    whole = hashlib.sha256()
    for name in sorted(parts):
        for box in sorted(parts[name]):
            data = parts[name][box]
            whole.update(f"{name} {box} {len(data)};".encode() + data)
    return whole.hexdigest()


def box_text(box: tuple[tuple[int, int], ...]) -> str:
    return json.dumps(box)


def expected_digest(boxes: Mapping[str, list[str]], step: int, life: int) -> str:
    """The digest of the named boxes of each leaf, as it must be at ``step`` of ``life``."""
    return digest(
        {
            name: {box: part(name, step, life, tuple(map(tuple, json.loads(box)))) for box in texts}
            for name, texts in boxes.items()
        }
    )


def position(step: int, life: int, process: int) -> list[int]:
    """The state of a process's iterator after a step."""
    return [process, step, life, 1000 * step + 7 * life + process]


def expected_position(step: int, life: int, process: int, before: int) -> list[int]:
    """After a restore in a job of another size: that of process ``process % before``."""
    return position(step, life, process % before)
