"""Final results of the demo's processes, and the comparison of two jobs. Pure; no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from emergency_ckpt.core.limits import ProcessIndex


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The final result of one process.

    Attributes:
      process_index: its index in the last life of the job.
      steps: number of steps of the final state.
      loss: loss of the last step, None when the last life trained no step.
      corpus: digest of the text that was trained on.
      shards: SHA-256 by shard, ``"<leaf>[start:stop,...]"``, of the shards on its devices.
      iterator: SHA-256 of the state of its data iterator.
    """

    process_index: int
    steps: int
    loss: float | None
    corpus: str
    shards: dict[str, str]
    iterator: str


class JobDigest(msgspec.Struct, frozen=True):
    """The final bits of a whole job, and the disagreements of its replicas.

    Attributes:
      tensors: SHA-256 by shard.
      iterators: SHA-256 by process index.
      disagreements: one line for each shard of which two processes hold different bits.
    """

    tensors: dict[str, str]
    iterators: dict[ProcessIndex, str]
    disagreements: tuple[str, ...]


def merge_results(results: Iterable[ProcessResult]) -> JobDigest:
    """Return the job's digest from the results of all its processes, in any order."""
    tensors: dict[str, str] = {}
    iterators: dict[int, str] = {}
    disagreements: list[str] = []
    for result in sorted(results, key=lambda result: result.process_index):
        iterators[result.process_index] = result.iterator
        for shard, digest in sorted(result.shards.items()):
            if tensors.setdefault(shard, digest) != digest:
                disagreements.append(f"{shard}: process {result.process_index} differs")
    return JobDigest(tensors, iterators, tuple(disagreements))


def differences(first: JobDigest, second: JobDigest, limit: int = 10) -> list[str]:
    """Return at most ``limit`` differences of two jobs; empty when they are bit-equal."""
    lines = [*first.disagreements, *second.disagreements]
    lines += _unequal(first.tensors, second.tensors, "")
    lines += _unequal(first.iterators, second.iterators, "iterator of process ")
    hidden = len(lines) - limit
    return lines if hidden <= 0 else [*lines[:limit], f"and {hidden} more"]


def _unequal(first: Mapping[Any, str], second: Mapping[Any, str], what: str) -> list[str]:
    names = sorted(first.keys() | second.keys())
    return [f"{what}{name} differs" for name in names if first.get(name) != second.get(name)]
