"""``eckpt ls STEP``: every leaf and shard with its CRC and holders, and the host states."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.shard_layout import shard_nbytes, state_size_bytes
from emergency_ckpt.errors import CheckpointError, CorruptData, StepNotFound
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.tier import ShardCopies, StepReader
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.cli.output import known_size_text, print_faults, print_line, print_table
from emergency_ckpt.tools.survey.places import SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.survey import take_survey
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


def run(args: argparse.Namespace) -> int:
    """Show a step; return 1 when it is damaged, or a part of it could not be read.

    Of several saves of the step a whole one is shown first, then that in RAM, then that of the
    newest incarnation. StepNotFound where no place has the step.
    """
    survey = take_survey(places_of(args))
    if not args.json:
        print_faults(survey.faults)
    saves = [
        save
        for save in survey.steps
        if save.step == args.step
        and args.tier in ("", save.tier)
        and args.incarnation in ("", save.incarnation)
    ]
    if not saves:
        problem = "no place that was given has it"
        raise StepNotFound("show", f"step {args.step}", problem, hint="'eckpt ls' lists steps")
    # Stable: within a state, RAM comes first and the newest incarnation before older ones.
    best = min(saves, key=lambda save: save.state != "whole")
    try:
        reader = survey.open_step(best)
    except CorruptData as error:
        fault = SurveyFault(error.target, error.problem)
        best = msgspec.structs.replace(best, state="damaged", reason=error.problem)
        shown = ShownStep(**msgspec.structs.asdict(best), faults=(fault,))
    else:
        leaves = tuple(_leaf(leaf, reader.copies(path)) for path, leaf in reader.leaves.items())
        host_states, faults = _host_states(reader)
        best = msgspec.structs.replace(
            best,
            incarnation=reader.save.incarnation,
            size_bytes=sum(leaf.size_bytes for leaf in leaves),
        )
        shown = ShownStep(
            **msgspec.structs.asdict(best), leaves=leaves, host_states=host_states, faults=faults
        )
    if args.json:
        print_json(shown)
    else:
        _print(shown)
    return BAD if shown.faults else GOOD


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
        size_bytes=state_size_bytes([leaf]),
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


def _print(shown: ShownStep) -> None:
    reason = f": {shown.reason}" if shown.reason else ""
    print_line(f"step {shown.step}, {shown.tier} tier, {shown.state.replace('_', ' ')}{reason}")
    print_line(f"run {shown.run_id or '-'}, incarnation {shown.incarnation or '-'}")
    print_line(f"{len(shown.leaves)} leaves, {known_size_text(shown.size_bytes)}")
    print()
    places = sorted(
        {h for leaf in shown.leaves for shard in leaf.shards for h in shard.holders}
        | {h for host_state in shown.host_states for h in host_state.holders}
    )
    numbers = {holder: str(number) for number, holder in enumerate(places)}
    rows = [row for leaf in shown.leaves for row in _shard_rows(leaf, numbers)]
    if rows:
        columns = ["LEAF", "DTYPE", "SHAPE", "BOX", "BYTES", "CRC32C", "HOLDERS"]
        print_table(columns, rows)
    for host_state in shown.host_states:
        holders_text = _held(host_state.holders, numbers)
        value = msgspec.json.encode(host_state.value).decode()
        where = f" (holders {holders_text})" if holders_text else ""
        print()
        print_line(f"host state of process {host_state.process} of {host_state.count}{where}:")
        print_line(value)
    if places:
        print("\nholders:")
        for holder, number in numbers.items():
            print_line(f"  {number}  {holder}")
    print_faults(shown.faults)


def _shard_rows(leaf: ShownLeaf, numbers: dict[str, str]) -> list[list[str]]:
    dtype = f"{leaf.dtype} ({leaf.key_impl})" if leaf.key_impl else leaf.dtype
    head = [leaf.path, dtype, str(list(leaf.shape))]
    if not leaf.shards:
        return [[*head, "-", str(leaf.size_bytes), "-", "-"]]
    return [
        [
            *(head if first else ["", "", ""]),
            describe(shard.box),
            str(shard.size_bytes),
            shard.crc32c or "-",
            _held(shard.holders, numbers) or "-",
        ]
        for first, shard in zip([True] + [False] * len(leaf.shards), leaf.shards, strict=False)
    ]


def _held(holders: tuple[str, ...], numbers: dict[str, str]) -> str:
    return ",".join(numbers[holder] for holder in holders)
