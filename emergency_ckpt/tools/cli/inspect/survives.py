"""``eckpt ls --survives``: the hosts and slices whose loss would cost the newest step in RAM."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.cli.output import print_faults, print_line, print_table

if TYPE_CHECKING:
    from emergency_ckpt.tools.offline.survival import Loss, SurvivalReport


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when the loss of one host or slice would cost the step."""
    # Imported here, so that `eckpt ls --survives --help` does not import the client of peers.
    from emergency_ckpt.tools.offline.survival import report_survival  # noqa: PLC0415

    if not (args.local_dir or args.peers):
        raise ConfigError(["name --local-dir, --peers or both"], target="eckpt ls --survives")
    report = report_survival(places_of(args, may_be_none=True), args.peers)
    if args.json:
        print_json(report)
    else:
        _print(report)
    return GOOD if report.survives_any_one and not report.faults else BAD


def _print(report: SurvivalReport) -> None:
    stored = "none" if report.stored_step is None else str(report.stored_step)
    if report.step is None:
        print_line(f"no whole step in RAM on {count_text(report.hosts, 'host', 'hosts')}")
    else:
        name = f"step {report.step} of run {report.run_id}, incarnation {report.incarnation}"
        print_line(f"newest in RAM: {name}; in storage: {stored}")
        _print_copies("shards", report.shards)
        _print_copies("host states", report.host_states)
        costly = [loss for loss in report.losses if loss.steps_lost != 0]
        print()
        if costly:
            columns = ["LOST", "LEFT", "STEPS LOST", "WITHOUT IT"]
            print_table(columns, [_row(loss) for loss in costly])
        else:
            slices = " and any one slice" if len(report.losses) > report.hosts else ""
            by_storage = any(loss.from_storage for loss in report.losses)
            why = f": storage has step {report.stored_step} too" if by_storage else ""
            print_line(f"the newest step outlives any one host{slices}{why}")
    print_faults(report.faults)


def _print_copies(what: str, parts_by_copies: Mapping[int, int]) -> None:
    if not parts_by_copies:
        return
    copies_text = ", ".join(
        f"{parts} with {count_text(copies, 'copy', 'copies')}"
        for copies, parts in parts_by_copies.items()
    )
    may_fail = min(parts_by_copies) - 1
    lost = count_text(may_fail, "host", "hosts")
    outcome = f"RAM outlives the loss of any {lost}"
    if may_fail == 0:
        outcome = "the loss of 1 host costs some of them in RAM"
    print_line(f"{what}: {copies_text}; {outcome}")


def _row(loss: Loss) -> list[str]:
    tier = " in storage" if loss.from_storage else ""
    left = "nothing" if loss.left_step is None else f"step {loss.left_step}{tier}"
    lost = "all" if loss.steps_lost is None else str(loss.steps_lost)
    return [f"{loss.what} {loss.name}", left, lost, loss.missing]
