"""``eckpt ls STEP``: one step in full: leaves, boxes, CRCs, holders and host states."""

from __future__ import annotations

import argparse

import msgspec

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.tools.cli import tables
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.survey.step import ShownLeaf, ShownStep, show_step
from emergency_ckpt.tools.survey.survey import take_survey


def run(args: argparse.Namespace) -> int:
    """Show a step; return 1 when it is absent, damaged, or could not be read."""
    survey = take_survey(places_of(args))
    if not args.json:
        tables.print_faults(survey.faults)
    shown = show_step(survey, args.step, tier=args.tier, incarnation=args.incarnation)
    if args.json:
        print_json(shown)
    else:
        _print(shown)
    return BAD if shown.faults else GOOD


def _print(shown: ShownStep) -> None:
    reason = f": {shown.reason}" if shown.reason else ""
    print(f"step {shown.step}, {shown.tier} tier, {shown.state.replace('_', ' ')}{reason}")
    print(f"run {shown.run_id or '-'}, incarnation {shown.incarnation or '-'}")
    print(f"{len(shown.leaves)} leaves, {tables.size(shown.size_bytes)}\n")
    places = sorted(
        {h for leaf in shown.leaves for shard in leaf.shards for h in shard.holders}
        | {h for each in shown.host_states for h in each.holders}
    )
    numbers = {holder: str(number) for number, holder in enumerate(places)}
    rows = [row for leaf in shown.leaves for row in _rows(leaf, numbers)]
    if rows:
        columns = ["LEAF", "DTYPE", "SHAPE", "BOX", "BYTES", "CRC32C", "HOLDERS"]
        tables.print_table(columns, rows)
    for each in shown.host_states:
        held = _held(each.holders, numbers)
        value = msgspec.json.encode(each.value).decode()
        where = f" (holders {held})" if held else ""
        print(tables.one_line(f"\nhost state of process {each.process} of {each.count}{where}:"))
        print(tables.one_line(value))
    if places:
        print("\nholders:")
        for holder, number in numbers.items():
            print(tables.one_line(f"  {number}  {holder}"))
    tables.print_faults(shown.faults)


def _rows(leaf: ShownLeaf, numbers: dict[str, str]) -> list[list[str]]:
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
