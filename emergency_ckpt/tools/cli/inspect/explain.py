"""``eckpt ls --explain``: the explanation of the last restore, from a job's event log."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

from emergency_ckpt.core.wording import TIER_WORDS, seconds_text, size_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extras.event_log import read_events
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, print_json
from emergency_ckpt.tools.cli.output import print_line, print_table
from emergency_ckpt.tools.survey.explanation import (
    PHASES,
    RestoredProcess,
    RestoreExplanation,
    last_restore,
)

_MOST_SENDERS = 4
_SPENT = (*map(str.upper, PHASES), "TOTAL")
_COLUMNS = ("PROCESS", "SLICE", *_SPENT, "OWN RAM", "PEERS", "STORAGE", "RECEIVED FROM")


def run(args: argparse.Namespace) -> int:
    """Tell the explanation; return 1 when the restore failed or did not end, or there is none."""
    directory: Path = args.explain
    try:
        history = read_events(directory)
    except OSError as error:
        problem = error.strerror or str(error)
        hint = "give the directory of the job's event_log"
        raise CheckpointError("read", os.fspath(directory), problem, hint=hint) from error
    for text in history.unreadable:
        print_line(f"{directory}: {text}", sys.stderr)
    if history.bad_lines:
        print_line(f"{directory}: {history.bad_lines} lines are no events", sys.stderr)
    if history.is_cut:
        print_line(f"{directory}: the log is large; only its newest part is read", sys.stderr)
    explanation = last_restore(history.events)
    if explanation is None:
        hint = "set event_log, or use the log of a job that has restored"
        problem = f"no restore is in its {len(history.events)} events"
        raise CheckpointError("read", os.fspath(directory), problem, hint=hint)
    if args.json:
        print_json(explanation)
    else:
        _print(explanation)
    is_good = explanation.outcome in ("finished", "nothing") and not history.unreadable
    return GOOD if is_good else BAD


def _print(explanation: RestoreExplanation) -> None:
    when = datetime.datetime.fromtimestamp(explanation.started_s).astimezone()
    print_line(f"run {explanation.run_id or '-'}, {when:%Y-%m-%d %H:%M:%S %z}")
    print_line(f"{_headline(explanation)}, in {seconds_text(explanation.seconds)}")
    if explanation.passed_over:
        print("\nnewer steps that were passed over:")
        for rejected in explanation.passed_over:
            tier = TIER_WORDS.get(rejected.tier, rejected.tier)
            print_line(f"  step {rejected.step} in {tier}: {rejected.reason}")
    if explanation.remarks:
        print("\nmeanwhile:")
        for remark in explanation.remarks:
            text = f"{remark.name}: {remark.text}"
            line = f"  +{remark.after_s:.3f} s  process {remark.process}  {text}"
            print_line(line)
    print()
    print_table(_COLUMNS, [_row(process) for process in explanation.processes])
    for process in explanation.processes:
        if process.outcome in ("failed", "unfinished"):
            reason = process.reason or f"it did not end; its last event is {process.last_event}"
            print_line(f"process {process.process}: {reason}")


def _headline(explanation: RestoreExplanation) -> str:
    asked = explanation.requested_step
    tier = TIER_WORDS.get(explanation.tier, explanation.tier)
    words = {
        "finished": f"step {explanation.step} was restored from {tier}",
        "nothing": "there was nothing to restore: a fresh start",
        "failed": "the restore failed",
        "unfinished": "the restore did not end on all processes",
    }
    return words[explanation.outcome] + ("" if asked is None else f" (step {asked} was requested)")


def _row(process: RestoredProcess) -> list[str]:
    spent = (*(process.phases[phase] for phase in PHASES), process.seconds)
    senders = sorted(process.received.items(), key=lambda item: -item[1])
    named = [f"{holder} {size_text(nbytes)}" for holder, nbytes in senders[:_MOST_SENDERS]]
    more = [f"{len(senders) - _MOST_SENDERS} more"] if len(senders) > _MOST_SENDERS else []
    return [
        str(process.process),
        "-" if process.slice is None else str(process.slice),
        *(seconds_text(value) if value else "-" for value in spent),
        size_text(process.bytes_local),
        size_text(process.bytes_peer),
        size_text(process.bytes_persistent),
        ", ".join([*named, *more]) or "-",
    ]
