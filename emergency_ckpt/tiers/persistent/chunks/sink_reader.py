"""Reads of boxes into a place that takes bytes: from the files where possible, else decoded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from emergency_ckpt import _native
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.tiers.persistent.chunks.file_reader import FileBox, Sink, read_into
from emergency_ckpt.tiers.persistent.chunks.index import ChunkIndex
from emergency_ckpt.tiers.persistent.orbax_reader import BoxReader
from emergency_ckpt.types import ShardId

_MOST_THREADS = 4


class SinkReader:
    """Reads boxes of one item. For one call of ``read``.

    Args:
      sink: a place for the bytes; it must refuse them once its owner does not want them any more.

    The other arguments are those of ``BoxReader``.
    """

    def __init__(
        self,
        item: str,
        arrays: Mapping[str, StoredArray],
        sink: Sink,
        *,
        complete: bool,
        buffer_bytes: int,
        deadline_s: float,
    ) -> None:
        self._item = item
        self._arrays = arrays
        self._sink = sink
        self._complete = complete
        self._buffer_bytes = buffer_bytes
        self._deadline_s = deadline_s

    def read(self, boxes: Sequence[tuple[ShardId, int]]) -> list[int]:
        """Read each box to its offset in bytes; return the CRC32C of each. Blocks.

        Errors of TensorStore, of the file system and of the sink pass through; CorruptData;
        DeadlineExceeded.
        """
        in_files = self._in_files(boxes)
        crcs: dict[int, int] = dict(
            zip(
                in_files,
                read_into(
                    list(in_files.values()),
                    self._sink,
                    threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))),
                    deadline_s=self._deadline_s,
                ),
                strict=True,
            )
        )
        others = [number for number in range(len(boxes)) if number not in in_files]
        if others:
            crcs.update(zip(others, self._decode([boxes[n] for n in others]), strict=True))
        return [crcs[number] for number in range(len(boxes))]

    def _in_files(self, boxes: Sequence[tuple[ShardId, int]]) -> dict[int, FileBox]:
        """Return the boxes that can be read from the files of the database, by their number."""
        if not any(self._arrays[shard.leaf].plain for shard, _ in boxes):
            return {}
        index = ChunkIndex.open(self._item, self._deadline_s)
        if index is None:
            return {}
        found: dict[int, FileBox] = {}
        for number, (shard, offset) in enumerate(boxes):
            parts = index.parts_of(shard, self._arrays[shard.leaf])
            if parts is not None:
                found[number] = FileBox(parts, offset)
        return found

    def _decode(self, boxes: Sequence[tuple[ShardId, int]]) -> list[int]:
        reader = BoxReader(
            self._item,
            self._arrays,
            complete=self._complete,
            buffer_bytes=self._buffer_bytes,
            deadline_s=self._deadline_s,
        )
        crcs: list[int] = []
        found = reader.read([shard for shard, _ in boxes])
        for (_, offset), (_, array) in zip(boxes, found, strict=True):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            crcs.append(_native.crc32c(data))
            self._sink.write(data, offset)
        return crcs
