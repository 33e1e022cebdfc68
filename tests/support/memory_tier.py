"""A tier in the memory of the process: the shortest implementation of ``tier.Tier``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import Box, is_empty, shape_of, whole
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, StepNotFound
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.tier import (
    Array,
    HeldDocument,
    ShardCopies,
    StepReader,
    copy_common,
)
from emergency_ckpt.types import LOCAL, LeafSpec, SaveId, TierName

Stored = dict[str, dict[Box, tuple[bytearray, int]]]
"""The bytes of each leaf by box, and their CRC32C."""


class MemoryStep:
    """A step in memory; see ``StepReader``. Made by ``of`` from arrays, or a copy of another."""

    saved_s: float | None = None
    metrics: Mapping[str, Any] | None = None

    def __init__(
        self,
        save: SaveId,
        leaves: Mapping[str, LeafSpec],
        stored: Stored,
        documents: Mapping[int, bytes],
    ) -> None:
        self.save = save
        self.name = f"step {save.step} in memory"
        self.notes: list[str] = []
        self._leaves = dict(leaves)
        self._stored = stored
        self._documents = dict(documents)

    @classmethod
    def copy_of(cls, step: StepReader) -> MemoryStep:
        """Read all of ``step``. Its errors pass through."""
        documents, stored = step.host_states(), Stored()
        for path in step.leaves:
            parts = stored.setdefault(path, {})
            for box in step.boxes(path):
                parts[box] = _with_crc(step.read(path, box))
        return cls(step.save, step.leaves, stored, documents)

    @classmethod
    def of(
        cls,
        save: SaveId,
        arrays: Mapping[str, tuple[LeafSpec, Array, Sequence[Box]]],
        documents: Mapping[int, bytes],
    ) -> MemoryStep:
        """Return a step of ``arrays``, each cut into its boxes."""
        stored: Stored = {}
        for path, (_, array, boxes) in arrays.items():
            cut = {box: array[tuple(slice(*span) for span in box)] for box in boxes}
            stored[path] = {box: _with_crc(part) for box, part in cut.items()}
        return cls(save, {path: spec for path, (spec, _, _) in arrays.items()}, stored, documents)

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        return self._leaves

    def copies(self, path: str) -> list[ShardCopies]:
        return [ShardCopies(box, crc) for box, crc in self.crcs(path).items()]

    def boxes(self, path: str) -> list[Box]:
        return list(self._stored[path])

    def crcs(self, path: str) -> dict[Box, int]:
        return {box: crc for box, (_, crc) in self._stored[path].items()}

    def read(self, path: str, box: Box) -> Array:
        dtype = dtype_named(self._leaves[path].dtype)
        array = np.empty(shape_of(box), dtype)
        for part, (data, crc) in self._stored[path].items():
            actual = _native.crc32c(data)
            if actual != crc:
                target = f"leaf {path!r} of {self.name}"
                raise CorruptData("read", target, "it is damaged", expected=crc, actual=actual)
            copy_common(array, box, np.frombuffer(data, dtype).reshape(shape_of(part)), part)
        return array

    def documents(self) -> list[HeldDocument]:
        count = len(self._documents)
        return [
            HeldDocument(
                HeldHostState(
                    self.save,
                    owner,
                    count,
                    hashlib.sha256(data).hexdigest(),
                    len(data),
                    decode(data).empty,
                )
            )
            for owner, data in sorted(self._documents.items())
        ]

    def document(self, held: HeldHostState) -> bytes:
        return self._documents[held.owner]

    def host_states(self) -> dict[int, bytes]:
        return dict(self._documents)

    def close(self) -> None:
        pass

    def damage(self) -> None:
        """Flip a bit in the first part of the largest leaf."""
        parts = max(self._stored.values(), key=lambda each: sum(len(x) for x, _ in each.values()))
        next(iter(parts.values()))[0][0] ^= 1


class MemoryTier:
    """Steps in memory; see ``Tier``. A publication is one assignment, so it is whole or absent."""

    def __init__(self, name: TierName = LOCAL) -> None:
        self.name = name
        self._steps: dict[int, MemoryStep] = {}
        self._chain: Timeline | None = None

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        del deadline_s
        saves = (each.save for each in self._steps.values())
        return sorted(save for save in saves if not self._rejection_reason(save))

    def _rejection_reason(self, save: SaveId) -> str:
        chain = self._chain
        return "" if chain is None else chain.rejection_reason(save.step, save.incarnation)

    def open_step(self, step: int, deadline_s: float | None = None) -> MemoryStep:
        del deadline_s
        if step not in self._steps:
            raise StepNotFound("open", f"step {step}", "it is not in memory")
        return self._steps[step]

    def publish(self, step: StepReader, chain: Timeline | None = None) -> None:
        copy = MemoryStep.copy_of(step)
        self._steps[copy.save.step] = copy
        self._chain = self._chain if chain is None else chain

    def remove(self, step: int, incarnation: str) -> None:
        del incarnation
        self._steps.pop(step, None)


def _with_crc(array: Array) -> tuple[bytearray, int]:
    data = bytearray(np.ascontiguousarray(array).tobytes())
    return data, _native.crc32c(data)


def boxes_of(spec: LeafSpec, parts: int) -> list[Box]:
    """Cut a leaf along its first axis into equal parts; a leaf without elements has none."""
    full = whole(spec.global_shape)
    if is_empty(full):
        return []
    if not full or full[0][1] % parts:
        return [full]
    size = full[0][1] // parts
    return [((n * size, (n + 1) * size), *full[1:]) for n in range(parts)]
