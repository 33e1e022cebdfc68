"""Check of the steps in RAM: the copies of each part, and what a lost host would cost."""

from __future__ import annotations

import dataclasses
import os

from emergency_ckpt.core.wording import count_text
from emergency_ckpt.tools.cli.doctor.findings import Finding
from emergency_ckpt.tools.offline.survival import SurvivalReport, copies_text, report_survival
from emergency_ckpt.tools.survey.places import Places


def check_copies(places: Places, peers: tuple[str, ...]) -> Finding:
    """Return the finding about the newest step of ``places.run_id`` in RAM. Blocks; reads only.

    A part is said to lack a copy only where the RAM of all processes of the job was read, because
    any other process may have one.
    """
    run_id = places.run_id or ""
    dirs = tuple(path for path in places.local_dirs if os.path.exists(path / run_id))
    if not (dirs or peers):
        return Finding("copies", "ok", f"no step of run {run_id!r} is in RAM")
    report = report_survival(dataclasses.replace(places, local_dirs=dirs), peers)
    found = _of_report(report, f"run {run_id!r}")
    if not report.faults:
        return found
    fault = report.faults[0]
    text = f"{found.text}; {count_text(len(report.faults), 'fault', 'faults')}: {fault.where}"
    mend = found.mend or "'eckpt ls --survives' lists the faults."
    return Finding("copies", "warning", f"{text}: {fault.problem}", mend, found.measured)


def _of_report(report: SurvivalReport, run: str) -> Finding:
    hosts = count_text(report.hosts, "host", "hosts")
    others = "give each other host's ramdisk (--local-dir), or --peers and the secret, to count"
    if report.step is None or report.shards is None:
        return Finding("copies", "ok", f"no whole step of {run} on {hosts}; {others} copies")
    if report.seen < report.processes:
        seen = f"{report.seen} of {count_text(report.processes, 'process', 'processes')}"
        return Finding("copies", "ok", f"step {report.step}: the RAM of {seen} was read; {others}")
    measured = {"step": report.step, "hosts": report.hosts}
    text = f"step {report.step} on {hosts}: {copies_text(report.shards)} of its parts"
    costly = [loss for loss in report.losses if loss.steps_lost != 0]
    if not costly:
        return Finding("copies", "ok", f"{text}; no one host's loss costs it", measured=measured)
    worst = min(costly, key=lambda loss: -1 if loss.left_step is None else loss.left_step)
    left = "nothing" if worst.left_step is None else f"step {worst.left_step}"
    more = f", and {len(costly) - 1} others do too" if len(costly) > 1 else ""
    text += f"; the loss of {worst.what} {worst.name} costs it, and leaves {left}{more}"
    mend = (
        "Along an axis of the mesh over several hosts that the state is not split on (replica_axis)"
        " each part has a second copy; else save to storage more often."
    )
    return Finding("copies", "warning", text, mend, measured)
