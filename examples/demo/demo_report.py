"""The demo's result: pure decisions over events and digests; a summary, a table, a plot, a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.figures import RunRecovery, recoveries_of
from emergency_ckpt.tools.report.lives import ReportRun, lives_of, run_events, whole
from emergency_ckpt.tools.report.page import page_of, write_whole
from emergency_ckpt.types import LOCAL, PERSISTENT
from examples.demo.results import JobDigest, differences
from examples.demo.scenarios import Scenario

Summary = dict[str, Any]

_NO_RECOVERY = RunRecovery(
    life=1,
    last_step=None,
    restored_step=None,
    tier="",
    steps_lost=None,
    at_least=False,
    lost_s=None,
    recovery_s=None,
    restore_s=None,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The results of one run of the job.

    Attributes:
      finished: every process ended with success.
      events: by time.
      digest: the final bits; None when the run did not finish.
      corpus: digests of the text that its processes read.
      seconds: wall time of the run.
    """

    finished: bool
    events: Sequence[LoggedEvent]
    digest: JobDigest | None
    corpus: frozenset[str]
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScenarioVerdict:
    """The result of one scenario; ``problems``: why it is not a success."""

    summary: Summary
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True when it recovered with the bits of the undisturbed run."""
        return bool(self.summary["recovered"] and self.summary["bitwise_equal"])


def losses(events: Sequence[LoggedEvent], life: int | None = None) -> dict[int, float]:
    """Return the loss by step, of one life or of all; the later value of a repeated step counts."""
    found: dict[int, float] = {}
    for event in sorted(events, key=lambda event: (event.life, event.time_s)):
        if event.name == "train.loss" and life in (None, event.life):
            found[event.fields["step"]] = event.fields["loss"]
    return found


def recovery_of(events: Sequence[LoggedEvent]) -> RunRecovery:
    """Return the first recovery after the first life."""
    return next(iter(recoveries_of(lives_of(events), events)), _NO_RECOVERY)


def restores_of(events: Sequence[LoggedEvent], life: int) -> list[LoggedEvent]:
    """Return the end of the restore of each process that finished it, in one life of the job."""
    newest: dict[int | None, LoggedEvent] = {}
    for event in events:
        if event.name == "restore.finished" and event.life == life:
            newest[event.process] = event
    return list(newest.values())


def bytes_by_tier(restores: Sequence[LoggedEvent]) -> dict[str, int]:
    """Return the bytes from the processes' own RAM, from peers, and from the persistent tier."""
    sources = (LOCAL, "peer", PERSISTENT)
    return {
        source: sum(whole(event, f"bytes_{source}") or 0 for event in restores)
        for source in sources
    }


def recovery_problems(
    scenario: Scenario,
    process_count: int,
    faulty: FinishedRun,
    recovery: RunRecovery,
    restores: Sequence[LoggedEvent],
) -> list[str]:
    """Return why the recovery is not the one expected of ``scenario``; empty when it is."""
    found: list[str] = []
    moved, processes = bytes_by_tier(restores), len(restores)
    if not faulty.finished:
        found.append("the job did not finish after the fault")
    if not any(event.name == "fault.fired" for event in faulty.events):
        found.append("the fault never fired, so the run proves nothing")
    if processes != process_count:
        found.append(f"{processes} of {process_count} processes report a restore")
    elif not recovery.restored_step:
        found.append("the processes do not report one restored step above 0")
    if processes and recovery.tier != scenario.tier:
        tier = f"the {recovery.tier} tier" if recovery.tier else "several tiers"
        found.append(f"the state came from {tier}, expected the {scenario.tier} tier")
    if scenario.is_notice and recovery.restored_step != recovery.last_step:
        found.append(
            f"training was at step {recovery.last_step} and continued from"
            f" {recovery.restored_step}, although there was time to save"
        )
    if scenario.needs_peers and not moved["peer"]:
        found.append("no byte came from a peer, although RAM was lost")
    if scenario.tier == LOCAL and moved[PERSISTENT]:
        found.append(
            f"{moved[PERSISTENT]} bytes came from the persistent tier, although the RAM of"
            " other hosts had all of them"
        )
    if scenario.tier == PERSISTENT and not moved[PERSISTENT]:
        found.append("no byte came from the persistent tier, although all RAM was lost")
    return found


def equality_problems(baseline: FinishedRun, faulty: FinishedRun) -> list[str]:
    """Return the differences of the final states; empty when they are equal bit for bit."""
    if baseline.digest is None or faulty.digest is None:
        return ["one of the two final states is missing"]
    if len(baseline.corpus | faulty.corpus) != 1:
        return ["the runs did not read the same text"]
    return differences(baseline.digest, faulty.digest)


def decide_verdict(
    scenario: Scenario, process_count: int, baseline: FinishedRun, faulty: FinishedRun
) -> ScenarioVerdict:
    """Return the result of the ``faulty`` run. ``seconds`` is the time of both runs together."""
    recovery = recovery_of(faulty.events)
    restores = restores_of(faulty.events, recovery.life)
    recovery_faults = recovery_problems(scenario, process_count, faulty, recovery, restores)
    equality_faults = equality_problems(baseline, faulty)
    lost = None
    if recovery.last_step is not None and recovery.restored_step is not None:
        lost = recovery.last_step - recovery.restored_step
    summary: Summary = {
        "recovered": not recovery_faults,
        "scenario": scenario.name,
        "fault_step": recovery.last_step,
        "restored_step": recovery.restored_step,
        "steps_lost": lost,
        "restore_seconds": round(recovery.restore_s or 0.0, 3),
        "bytes": bytes_by_tier(restores),
        "bitwise_equal": not equality_faults,
        "final_loss": _last(losses(faulty.events)),
        "baseline_final_loss": _last(losses(baseline.events)),
        "seconds": round(baseline.seconds + faulty.seconds, 1),
    }
    return ScenarioVerdict(
        summary=summary,
        problems=(*recovery_faults, *equality_faults),
    )


def _last(by_step: Mapping[int, float]) -> float | None:
    return round(by_step[max(by_step)], 6) if by_step else None


def summary_document(
    verdicts: Sequence[ScenarioVerdict], *, seconds: float, every: bool, not_run: Sequence[str] = ()
) -> Summary:
    """Return the content of ``summary.json``: one summary, or with ``every`` all and totals.

    The totals are ``recovered`` and ``bitwise_equal`` (true when true of each), ``seconds``, and
    ``not_run``, the scenarios that had not run when the demonstration was stopped.
    """
    if not every:
        (verdict,) = verdicts
        return verdict.summary
    summaries = [verdict.summary for verdict in verdicts]
    return {
        **({"not_run": list(not_run)} if not_run else {}),
        "recovered": all(summary["recovered"] for summary in summaries),
        "bitwise_equal": all(summary["bitwise_equal"] for summary in summaries),
        "seconds": round(seconds, 1),
        "scenarios": summaries,
    }


def write_summary(path: Path, document: Summary) -> None:
    """Write ``document`` as JSON."""
    write_whole(path, json.dumps(document, indent=2) + "\n")


def summary_table(verdicts: Sequence[ScenarioVerdict]) -> Table:
    """Return the results as a table for people, one row per scenario."""
    table = Table(
        title="The disturbed runs against the undisturbed one",
        box=None,
        collapse_padding=True,
        header_style="underline",
    )
    table.add_column("scenario", no_wrap=True)
    for heading in (
        "recovered",
        "equal\nbits",
        "fault\nat",
        "back\nto",
        "restore",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("own\nRAM", "peers'\nRAM", "persist.\ntier"):
        table.add_column(heading, justify="right", no_wrap=True)
    for verdict in verdicts:
        summary = verdict.summary
        moved = summary["bytes"]
        table.add_row(
            summary["scenario"],
            _yes_no(summary["recovered"]),
            _yes_no(summary["bitwise_equal"]),
            str(summary["fault_step"]),
            str(summary["restored_step"]),
            f"{summary['restore_seconds']:.2f} s",
            *(size_text(moved[source]) for source in (LOCAL, "peer", PERSISTENT)),
        )
    first = verdicts[0].summary
    table.caption = (
        f"final loss {_loss_text(first['final_loss'])},"
        f" undisturbed {_loss_text(first['baseline_final_loss'])}"
    )
    return table


def _yes_no(value: bool) -> str:
    return "[green]yes[/]" if value else "[bold red]NO[/]"


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def plot_losses(path: Path, baseline: FinishedRun, faulty: Mapping[str, FinishedRun]) -> None:
    """Draw one panel for each faulty run: both loss curves, the fault and the recovery."""
    mpl.use("Agg")
    figure = Figure(figsize=(9, 3.6 * len(faulty)), layout="constrained")
    panels = figure.subplots(len(faulty), 1, squeeze=False)
    undisturbed = losses(baseline.events)
    for panel, (name, record) in zip(panels[:, 0], faulty.items(), strict=True):
        recovery = recovery_of(record.events)
        panel.plot(
            list(undisturbed),
            list(undisturbed.values()),
            color="0.65",
            linewidth=5,
            label="undisturbed",
        )
        for life, style in ((0, "-"), (1, "--")):
            curve = losses(record.events, life)
            label = "before the fault" if life == 0 else "after the recovery"
            panel.plot(list(curve), list(curve.values()), style, label=label)
        if recovery.last_step is not None:
            label = f"fault: {recovery.last_step}"
            panel.axvline(recovery.last_step, color="tab:red", label=label)
        if recovery.restored_step is not None:
            panel.axvline(
                recovery.restored_step,
                color="tab:green",
                linestyle=":",
                label=f"restored: {recovery.restored_step}",
            )
        panel.set(title=name, xlabel="step", ylabel="loss (nats per byte)")
        panel.legend()
    figure.savefig(path, dpi=110)


def write_page(path: Path, baseline: FinishedRun, faulty: Mapping[str, FinishedRun]) -> None:
    """Write one page about the runs with a fault, by scenario, and the undisturbed one."""
    runs = {**faulty, "undisturbed": baseline}
    sections = [
        ReportRun(title=name, events=run_events(record.events))
        for name, record in runs.items()
        if record.events
    ]
    write_whole(path, page_of("Runs of the demo", sections))
