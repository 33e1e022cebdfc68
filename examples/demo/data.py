"""The demo's data: the Python standard library's own sources, through a Grain pipeline.

The order depends on the seed alone. Each process reads its own share of the windows, so the
position of its iterator is non-tensor state, which a checkpoint must restore.
"""

from __future__ import annotations

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


def read_corpus() -> Bytes:
    """Return the ``*.py`` files of the standard library's directory, joined by name.

    At most ``MAX_CORPUS_BYTES``. FileNotFoundError when there is no source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")):
        if size >= MAX_CORPUS_BYTES:
            break
        parts.append(path.read_bytes()[: MAX_CORPUS_BYTES - size])
        size += len(parts[-1])
    if not size:
        raise FileNotFoundError(f"read corpus {root}: no Python source here; the demo trains on it")
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def corpus_digest(corpus: Bytes) -> str:
    """Return the SHA-256 of the text, which must be equal for runs that are compared."""
    return hashlib.sha256(corpus.tobytes()).hexdigest()


def make_iterator(
    corpus: Bytes,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int,
) -> BatchIterator:
    """Return this process's endless batches, reshuffled at each pass over the text.

    ``batch_size``: sequences of one process. Neighbours overlap by one byte: the last target of a
    window is the first input of the next. ValueError when the text does not give every process one
    batch.
    """
    windows = (len(corpus) - 1) // sequence_length
    share = windows // process_count
    if share < batch_size:
        raise ValueError(
            f"make iterator: {windows} windows give {share} to each of {process_count}"
            f" processes, fewer than a batch of {batch_size}; give a longer text"
        )
    overlapping = np.lib.stride_tricks.sliding_window_view(corpus, sequence_length + 1)
    source: Any = overlapping[::sequence_length]
    # Equal shares, because a process with a shorter one would start its next pass sooner.
    dataset = (
        grain.MapDataset.source(source)
        .seed(seed)
        .shuffle()
        .slice(slice(process_index, share * process_count, process_count))
        .repeat()
        .batch(batch_size, drop_remainder=True)
    )
    # One reading thread, because the processes share few cores and a window is a slice of memory.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))
