"""The check of every byte of a stored step: it is read, and CRC32Cs are compared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.shard_layout import shard_nbytes
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage.step_reader import PIECE_BYTES, StoredStepReader
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.tools.offline.check_places import Advance, CheckCounts
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.types import ShardId


def check_stored(
    stored_step: FoundStep, places: Places, counts: CheckCounts, advance: Advance
) -> Iterator[SurveyFault]:
    """Read a step from storage and yield a fault for each box that is damaged. Blocks.

    ``places.timeout_s`` bounds the reading of each ``PIECE_BYTES``.
    """
    number = stored_step.step.step
    name = f"{places.directory}/{number}"
    step = places.storage().reader(stored_step)
    try:
        step.arrays()
        pieces = list(_pieces(step))
    except CheckpointError as error:
        yield SurveyFault.of(name, error, number)
        return
    for some, nbytes in pieces:
        try:
            damaged = list(_damaged(step, some, counts))
        except CheckpointError as error:
            if error.retryable:
                yield SurveyFault.of(name, error, number)
                return
            # A box that cannot be decoded ends the reading of all boxes: read alone, it shows
            # itself.
            damaged = list(_one_by_one(step, some))
        for shard, problem in damaged:
            yield SurveyFault(f"{name}, {shard.leaf}{describe(shard.box)}", problem, number)
        advance(nbytes)


def _damaged(
    step: StoredStepReader, some: list[ShardId], counts: CheckCounts
) -> Iterator[tuple[ShardId, str]]:
    for shard, array in step.read_all(some):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        counts.bytes += len(data)
        expected = step.crcs(shard.leaf).get(shard.box)
        if expected is None:
            continue
        counts.shards += 1
        actual = _native.crc32c(data)
        if actual != expected:
            yield (
                shard,
                "it is damaged: its CRC32C differs from that of capture"
                f" (expected {expected:08x}, got {actual:08x})",
            )


def _pieces(step: StoredStepReader) -> Iterator[tuple[list[ShardId], int]]:
    """Yield the boxes of a step in parts of about ``PIECE_BYTES``, with their bytes."""
    some: list[ShardId] = []
    total = 0
    for path, leaf in step.leaves.items():
        for box in step.boxes(path):
            some.append(ShardId(path, box))
            total += shard_nbytes(leaf, box)
            if total >= PIECE_BYTES:
                yield some, total
                some, total = [], 0
    if some:
        yield some, total


def _one_by_one(step: StoredStepReader, some: list[ShardId]) -> Iterator[tuple[ShardId, str]]:
    for shard in some:
        try:
            step.read(shard.leaf, shard.box)
        except CheckpointError as error:
            yield shard, error.problem
            if error.retryable:
                return  # storage is away: each of the others would wait as long
