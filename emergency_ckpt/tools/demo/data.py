"""The demo's data: the Python standard library's own sources, through a Grain pipeline.

The order depends on the seed alone. Each process reads its own share of the windows, so the
position of its iterator is non-tensor state, which a checkpoint must restore.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.limits import MAX_CORPUS_BYTES

Bytes = npt.NDArray[np.uint8]


class BatchIterator(Protocol):
    """A Grain iterator over uint8 batches of shape (sequences, sequence_length + 1)."""

    def __next__(self) -> Bytes: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the pipeline. ``batch_size``: number of sequences of one process."""

    sequence_length: int
    batch_size: int
    seed: int
    process_index: int
    process_count: int


def read_corpus(directory: Path | None = None, limit_bytes: int = MAX_CORPUS_BYTES) -> Bytes:
    """Return the ``*.py`` files of ``directory``, joined by name, up to ``limit_bytes``.

    By default the standard library's directory. Raises FileNotFoundError when there is no source.
    """
    root = directory or Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")):
        if size >= limit_bytes:
            break
        parts.append(path.read_bytes()[: limit_bytes - size])
        size += len(parts[-1])
    if not size:
        raise FileNotFoundError(f"read corpus {root}: no Python source here; the demo trains on it")
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def corpus_digest(corpus: Bytes) -> str:
    """Return the SHA-256 of the text, which must be equal for runs that are compared."""
    return hashlib.sha256(corpus.tobytes()).hexdigest()


class WindowSource:
    """Random access to the windows of ``length + 1`` bytes at each multiple of ``length``.

    Neighbours overlap by one byte: the last target of a window is the first input of the next.
    """

    def __init__(self, corpus: Bytes, length: int) -> None:
        self._corpus = corpus
        self._length = length

    def __len__(self) -> int:
        return max(0, (len(self._corpus) - 1) // self._length)

    def __getitem__(self, index: int) -> Bytes:
        start = int(index) * self._length
        return self._corpus[start : start + self._length + 1]


def make_iterator(config: DataConfig, corpus: Bytes) -> BatchIterator:
    """Return this process's endless batches, reshuffled at each pass over the text.

    Raises ValueError when the text does not give every process one batch.
    """
    source = WindowSource(corpus, config.sequence_length)
    share = len(source) // config.process_count
    if share < config.batch_size:
        raise ValueError(
            f"make iterator: {len(source)} windows give {share} to each of {config.process_count}"
            f" processes, fewer than a batch of {config.batch_size}; give a longer text"
        )
    # Equal shares, because a process with a shorter one would start its next pass sooner.
    dataset = (
        grain.MapDataset.source(source)
        .seed(config.seed)
        .shuffle()
        .slice(slice(config.process_index, share * config.process_count, config.process_count))
        .repeat()
        .batch(config.batch_size, drop_remainder=True)
    )
    # One reading thread, because the processes share few cores and a window is a slice of memory.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))
