"""Data that differs for each process and from batch to batch, through Grain."""

from __future__ import annotations

import dataclasses
from typing import Any

import grain
import numpy as np

RECORDS = 400


@dataclasses.dataclass(frozen=True)
class Rows:
    """``RECORDS`` rows of ``width`` numbers, no two alike. Grain compares sources by their repr."""

    width: int

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.sin(np.arange(self.width, dtype=np.float32) + 10 * int(index))


def loader(width: int, process: int, count: int) -> grain.DataLoader:
    """Batches of one row; its iterators have a state of bytes."""
    return grain.DataLoader(
        data_source=Rows(width),
        sampler=grain.samplers.IndexSampler(
            num_records=RECORDS,
            shuffle=True,
            seed=11,
            num_epochs=None,
            shard_options=grain.sharding.ShardOptions(shard_index=process, shard_count=count),
        ),
        operations=[grain.transforms.Batch(1)],
        worker_count=0,
    )


def dataset(width: int, process: int, count: int) -> grain.IterDataset:
    """The same as a dataset, read ahead by a thread; its iterators have a state of dicts."""
    rows = grain.MapDataset.source(Rows(width)).seed(12).shuffle()[process::count]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return rows.repeat(8).batch(1).to_iter_dataset(options)
