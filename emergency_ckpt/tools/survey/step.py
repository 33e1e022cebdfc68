"""One step in full: every leaf and shard with its CRC and holders, and the host states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, shard_nbytes
from emergency_ckpt.errors import CheckpointError, CorruptData, StepNotFound
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.tier import ShardCopies, StepReader
from emergency_ckpt.tools.survey.places import SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.survey import Survey
from emergency_ckpt.types import Box, LeafSpec

FORMAT = 2

_TEXT_CHARS = 120
_ITEMS = 16
_DEPTH = 16


class ShownShard(msgspec.Struct, frozen=True):
    """One box of a leaf, with one value of its bytes.

    Attributes:
      crc32c: of capture time, eight hexadecimal digits; null without a record.
      holders: process directories that have it with this CRC; empty in storage. Two entries of one
        box are replicas that differ.
    """

    box: Box
    size_bytes: int
    crc32c: str | None
    holders: tuple[str, ...]


class ShownLeaf(msgspec.Struct, frozen=True):
    """One leaf. ``shards``: as they were saved; none for an array without elements in storage."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    size_bytes: int
    shards: tuple[ShownShard, ...]


class ShownHostState(msgspec.Struct, frozen=True):
    """The host state of one process. ``value``: abbreviated, as FORMAT.md describes a payload."""

    process: int
    count: int
    digest: str
    size_bytes: int
    holders: tuple[str, ...]
    value: Any


class ShownStep(SurveyedStep, frozen=True, kw_only=True):
    """One save in one tier, with what is in it."""

    format: int = FORMAT
    leaves: tuple[ShownLeaf, ...] = ()
    host_states: tuple[ShownHostState, ...] = ()
    faults: tuple[SurveyFault, ...] = ()


def show_step(survey: Survey, step: int, *, tier: str = "", incarnation: str = "") -> ShownStep:
    """Return the step in full. Blocks for storage.

    Of several saves of the step a whole one is shown first, then that in RAM, then that of the
    newest incarnation.

    Args:
      tier: the name of a tier; empty for either one.

    Raises:
      StepNotFound: no place has it.
      CheckpointError: the step cannot be described.
    """
    saves = [
        save
        for save in survey.steps
        if save.step == step and tier in ("", save.tier) and incarnation in ("", save.incarnation)
    ]
    if not saves:
        raise StepNotFound(
            "show", f"step {step}", "no place that was given has it", hint="'eckpt ls' lists steps"
        )
    # Stable: within a state, RAM comes first and the newest incarnation before older ones.
    best = min(saves, key=lambda save: save.state != "whole")
    try:
        reader = survey.open_step(best)
    except CorruptData as error:
        fault = SurveyFault(error.target, error.problem)
        best = msgspec.structs.replace(best, state="damaged", reason=error.problem)
        return ShownStep(**msgspec.structs.asdict(best), faults=(fault,))
    leaves = tuple(_leaf(leaf, reader.copies(path)) for path, leaf in reader.leaves.items())
    host_states, faults = _host_states(reader)
    best = msgspec.structs.replace(
        best,
        incarnation=reader.save.incarnation,
        size_bytes=sum(leaf.size_bytes for leaf in leaves),
    )
    return ShownStep(
        **msgspec.structs.asdict(best), leaves=leaves, host_states=host_states, faults=faults
    )


def _host_states(
    reader: StepReader,
) -> tuple[tuple[ShownHostState, ...], tuple[SurveyFault, ...]]:
    shown: list[ShownHostState] = []
    faults: list[SurveyFault] = []
    for host_state, holders in reader.documents():
        value, size_bytes = None, host_state.size_bytes
        if not host_state.empty:
            try:
                data = reader.document(host_state)
                value, size_bytes = abbreviated(decode(data).payload), len(data)
            except CheckpointError as error:
                where = holders[0] if holders else error.target
                faults.append(SurveyFault.of(where, error, reader.save.step))
        shown.append(
            ShownHostState(
                host_state.owner, host_state.count, host_state.digest, size_bytes, holders, value
            )
        )
    return tuple(shown), tuple(faults)


def _leaf(leaf: LeafSpec, copies: Sequence[ShardCopies]) -> ShownLeaf:
    return ShownLeaf(
        path=leaf.path,
        dtype=leaf.dtype,
        shape=leaf.global_shape,
        key_impl=leaf.key_impl,
        size_bytes=math.prod(leaf.global_shape) * DTYPE_ITEM_BYTES.get(leaf.dtype, 0),
        shards=tuple(
            ShownShard(box, shard_nbytes(leaf, box), f"{crc:08x}", holders)
            for box, crc, holders in copies
        ),
    )


def abbreviated(value: Any, depth: int = 0) -> Any:
    """Return a JSON value (a host state) of bounded size; a cut says how much was left out."""
    if depth >= _DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, str) and len(value) > _TEXT_CHARS:
        return f"{value[:_TEXT_CHARS]}... ({len(value)} characters)"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        short = [abbreviated(item, depth + 1) for item in items[:_ITEMS]]
        more = len(items) - _ITEMS
        return [*short, f"... ({more} more)"] if more > 0 else short
    if isinstance(value, dict):
        fields = list(cast("dict[str, Any]", value).items())
        kept = {key: abbreviated(item, depth + 1) for key, item in fields[:_ITEMS]}
        more = len(fields) - _ITEMS
        return {**kept, "...": f"({more} more)"} if more > 0 else kept
    return value
