"""The start of a checkpointer, on all processes together, with its checks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from emergency_ckpt.assembly import (
    Assembly,
    Base,
    Storage,
    assemble,
    look_at_storage,
    open_storage,
    watch_notices,
)
from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.departures import Departures
from emergency_ckpt.cluster.hang.hang_watch import HangWatch
from emergency_ckpt.cluster.hang.step_progress import StepProgress
from emergency_ckpt.cluster.membership import Membership
from emergency_ckpt.cluster.peer_signs import DeathWatch, PeerSigns
from emergency_ckpt.cluster.peers import Known
from emergency_ckpt.cluster.preemption.watch import PreemptionWatch
from emergency_ckpt.cluster.rounds import run_on_all
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.secret.derived_keys import RunSecret
from emergency_ckpt.errors import RestoreFailed
from emergency_ckpt.event_log.log_writer import NO_LOG, life_of, open_event_log
from emergency_ckpt.events import EventSink
from emergency_ckpt.metrics.jax_events import record_for_jax
from emergency_ckpt.start.claim import told_refusal
from emergency_ckpt.start.config_warnings import config_warnings
from emergency_ckpt.start.greetings import Greetings

_GREETING_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Opened:
    """A place in the job, and the checkpointer's parts there."""

    member: Membership
    watch: PreemptionWatch
    departures: Departures
    failures: Failures
    parts: Assembly
    events: EventSink
    progress: StepProgress | None
    hang: HangWatch | None

    def expect_no_step(self) -> None:
        """Tell the others that this process makes no more steps. Idempotent; not collective."""
        if self.hang is not None:
            self.hang.close()

    def release(self, reason: str) -> None:
        """Release ramdisk, port and threads, and tell the others ``reason``. Not collective.

        Idempotent. The end of the event log is written, which a silent file server delays by 5 s.
        """
        self.expect_no_step()
        if self.parts.probe is not None:
            self.parts.probe.end()
        _release(self.departures, self.watch, self.member, reason)
        self.events.close()


def open_together(config: Config, start: str, process: tuple[int, int], buffers: Buffers) -> Opened:
    """Open both tiers, and return when all processes have. Collective; blocks.

    ``start``: the name of this start. ``process``: (index, count). It succeeds on all processes or
    on none. Raises as ``Membership``; DirectoryInUse on all; LocalTierError and, with
    "storage" in ``require``, PersistentTierError, with "peers", PeerUnreachable on the failing
    process, RestoreFailed on the others.
    """
    events = _sink(config, process[0])
    try:
        return _open(config, start, process, buffers, events)
    except BaseException:
        events.close()
        raise


def _sink(config: Config, me: int) -> EventSink:
    events = EventSink(config.on_event, process_index=me)
    events.locate(run_id=config.run_name)
    if config.event_log is not None and config.event_log != NO_LOG:
        log = open_event_log(Path(config.event_log), me, life=life_of(os.environ))
        events.add(log)
        events.on_close(log.close)
    events.add(record_for_jax)
    if config.metrics_port is not None:
        from emergency_ckpt.metrics.prometheus import run_metrics  # noqa: PLC0415 - an extra

        events.add(run_metrics())
    return events


def _open(
    config: Config, start: str, process: tuple[int, int], buffers: Buffers, events: EventSink
) -> Opened:
    failures = Failures()
    for text in config_warnings(config, process[0]):
        events.emit("start.warning", text=text)
    storage: Storage | None = None

    def known(secret: RunSecret) -> Known:
        nonlocal storage
        storage = open_storage(config, process, secret, buffers, events, failures)
        return look_at_storage(config, storage)

    member = Membership(config, process, start, events, known)
    if process[0] != 0:
        storage = open_storage(config, process, member.secret, buffers, events, failures)
    events.locate(incarnation=member.incarnation)
    watch = watch_notices(config, member.coordinator, events)
    signs = PeerSigns(member.peers.address_of, member.client)
    departures = Departures(member.coordinator, signs)
    deaths = DeathWatch(signs, member.peers.known, departures)
    base = Base(
        config, process, buffers, member, watch, events, failures, departures, storage, deaths
    )
    try:
        parts = assemble(base)
        # Also so that no process's restore timeout runs while the leader waits for storage.
        errors = run_on_all(
            member.coordinator, "opened", lambda: _look(base, parts), watch, config.start_timeout_s
        )
        if errors:
            refusal = told_refusal(member.coordinator)
            if refusal is not None:
                raise refusal
            raise RestoreFailed("start", "the job", errors)
    except BaseException as error:
        _release(departures, watch, member, text_of(error))
        raise
    if parts.probe is not None and "storage" not in config.require:
        parts.probe.start()
    progress: StepProgress | None = None
    hang: HangWatch | None = None
    if config.hang_timeout_s is not None:
        progress = StepProgress()
        hang = HangWatch(progress, member.coordinator, events, config.hang_timeout_s)
    return Opened(member, watch, departures, failures, parts, events, progress, hang)


def _look(base: Base, parts: Assembly) -> None:
    """Check for faults that would otherwise show only at a loss or at a save."""
    config, member = base.config, base.member
    if config.metrics_port is not None:
        _serve_metrics(config.bind_host or _LOOPBACK, config.metrics_port, base.events)
    if parts.claim is not None:
        parts.claim.check(member.coordinator)
    # Where a peer must answer, a slow one would end the job.
    must_answer = "peers" in config.require
    longest_s = config.start_timeout_s / (2 if must_answer else 4)
    timeout_s = longest_s if must_answer else min(_GREETING_TIMEOUT_S, longest_s)
    greetings = Greetings(member.peers, base.process, base.events, timeout_s)
    if parts.probe is not None and "storage" in config.require:
        parts.probe.run()
    member.adopt_orphans()
    greetings.finish(required=must_answer)
    if parts.claim is not None:
        parts.claim.finish(member.coordinator, member.incarnation)


def _serve_metrics(host: str, port: int, events: EventSink) -> None:
    from emergency_ckpt.metrics.prometheus import serve_metrics  # noqa: PLC0415 - an extra

    server = serve_metrics(host, port)
    events.on_close(server.close)
    events.emit("start.metrics", host=host, port=server.port)


def _release(
    departures: Departures, watch: PreemptionWatch, member: Membership, reason: str
) -> None:
    departures.gone(reason)
    watch.close()
    member.leave()


def text_of(error: BaseException) -> str:
    """Return ``error`` in one line of bounded length."""
    return f"{type(error).__name__}: {str(error)[:500]}"
