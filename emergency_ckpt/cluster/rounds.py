"""The round that ends a start or a restore: no process continues before all have finished it.

It is one round for everything, since each costs milliseconds with two processes and more with
thousands, and a restore with nothing lost consists of little else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import Coordinator, joined_errors, run_and_report
from emergency_ckpt.cluster.messages import decode_each, decode_message
from emergency_ckpt.cluster.preemption.watch import PreemptionWatch
from emergency_ckpt.cluster.round import Round, Series
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.errors import CheckpointError


class _Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error and the last preemption check of one process, and in the end of all."""

    error: str
    number: int


def run_on_all(
    coordinator: Coordinator,
    name: str,
    work: Callable[[], object],
    watch: PreemptionWatch,
    timeout_s: float,
    series: Series | None = None,
) -> str:
    """Run ``work`` and return when all have; ``watch`` continues from a common number. Collective.

    Raises this process's own error, as a CheckpointError. Returns the errors of the others, empty
    when there are none. ``series``: as of ``Round``.
    """

    def tell(error: str) -> str:
        own = msgspec.json.encode(_Ready(error, watch.last_number))
        held = Round(coordinator, name, timeout_s, prompt=True, series=series)
        data = held.hold(own, held.when_all(lambda said: _together(said, name)))
        together = decode_message(data, _Ready, f"{name}.told", limit_bytes=MAX_MESSAGE_BYTES)
        watch.go_on_from(together.number)
        return together.error

    return run_and_report(work, tell)


def leave_together(coordinator: Coordinator, timeout_s: float) -> None:
    """Return when all processes have called this. A failure is logged.

    The exit of one process can get the others killed, or end JAX's coordination service.
    """
    try:
        held = Round(coordinator, "preempted", timeout_s, prompt=True)
        held.hold(b"", held.when_all(lambda _: b""))
    except CheckpointError as error:
        logging.warning("not all processes finished in time after the notice: %s", error)


def _together(found: Mapping[int, bytes], name: str) -> bytes:
    reports = decode_each(found, _Ready, name, lambda text: _Ready(text, 0))
    errors = joined_errors({p: report.error for p, report in reports.items()})
    return msgspec.json.encode(_Ready(errors, max(report.number for report in reports.values())))
