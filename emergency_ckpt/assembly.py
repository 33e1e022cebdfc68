"""Builds the parts of a checkpointer from its config. No behaviour of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator, connect_start
from emergency_ckpt.cluster.departures import Departures
from emergency_ckpt.cluster.membership import Membership
from emergency_ckpt.cluster.preemption.sources import open_sources
from emergency_ckpt.cluster.preemption.watch import PreemptionWatch, find_notices
from emergency_ckpt.cluster.start_agreement import agree_settings, tell_problem
from emergency_ckpt.cluster.storage.claim import DirectoryClaim
from emergency_ckpt.cluster.storage.timeline import StorageTimeline
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.core.run_claim import RunRecord
from emergency_ckpt.core.secret.keys import RunSecret
from emergency_ckpt.core.secret.step_signature import step_signing
from emergency_ckpt.errors import ConfigError, CorruptData, PersistentTierError
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.prefetch import Prefetches
from emergency_ckpt.restore.request import RestoreParts
from emergency_ckpt.restore.steps import StepCatalog
from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.save.saver import Saver
from emergency_ckpt.save.saver_parts import SaverParts
from emergency_ckpt.save.vote import Vote
from emergency_ckpt.start.claim import ClaimAtStart, known_lives
from emergency_ckpt.start.storage_probe import StorageProbe
from emergency_ckpt.tiers.persistent.steps.removal import StepRecords
from emergency_ckpt.tiers.persistent.tier import PersistentTier

_PROBE_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Base:
    """The base of all other parts. ``process``: (index, count) of this one."""

    config: Config
    process: tuple[int, int]
    member: Membership
    watch: PreemptionWatch
    events: EventSink
    failures: Failures
    departures: Departures


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts that a checkpointer's methods use.

    Attributes:
      preservation: None without a directory.
      probe: None without a test of storage: no saves there, it just failed, or another process
        tests it.
      claim: the leader's check of the directory's claim; None on other processes, and without
        saves there.
    """

    local_saves: LocalSaves
    preservation: Preservation | None
    restore_parts: RestoreParts
    prefetches: Prefetches
    saver: Saver
    steps: StepCatalog
    probe: StorageProbe | None
    claim: ClaimAtStart | None


def agreed_config(config: Config, settings: Mapping[str, Any]) -> tuple[Config, str]:
    """Return the complete config, equal on all processes where it must be, and the start's name.

    Collective; ConfigError on all.
    """
    coordinator = connect_start()
    try:
        config = config.set(**settings).validated()
    except ConfigError as error:
        tell_problem(coordinator, error)
        raise
    return config, agree_settings(coordinator, config.shared_settings(), config.start_timeout_s)


def watch_notices(config: Config, coordinator: Coordinator, events: EventSink) -> PreemptionWatch:
    """Return the watch for preemption notices, and log and emit their sources."""
    if not config.heeds_preemption:
        return PreemptionWatch(None, grace_s=config.preemption_grace_s)
    notices = find_notices(coordinator, config.save_timeout_s)
    watch = PreemptionWatch(notices, grace_s=config.preemption_grace_s)
    sources = open_sources(config.preemption_notice, config.preemption_grace_s)
    names = ", ".join([notices.source, *(source.name for source in sources)])
    events.emit("preemption.source", source=names)
    logging.info("preemption notices come from: %s", names)
    watch.poll(sources, events)
    return watch


def assemble(base: Base) -> Assembly:
    """Open the persistent tier and build all parts. Blocks for storage at the leader."""
    persistent = _open_persistent(base.config, base.member.secret)
    claim = None if persistent is None else _claim(base, persistent)
    probe, at_start = (
        (None, None) if persistent is None or claim is None else _reach(base, persistent, claim)
    )
    timelines = Timelines(base.member.tier, base.events, base.member.newest_step)
    storage: StorageTimeline | None = None
    preservation: Preservation | None = None
    if persistent is not None and claim is not None:
        storage = StorageTimeline(persistent, timelines, base.events, claim)
        preservation = _preservation(base, persistent, timelines, claim)
    local_saves = _local_saves(base, timelines)
    restore_parts = _restore_parts(base, persistent, timelines, storage, claim)
    prefetches = Prefetches(restore_parts)
    member = base.member
    saver = Saver(
        SaverParts(
            config=base.config,
            process=base.process,
            coordinator=member.coordinator,
            tier=member.tier,
            local=local_saves,
            persistent=None
            if persistent is None or storage is None
            else _persistent_saves(base, persistent, storage),
            preservation=preservation,
            watch=base.watch,
            timelines=timelines,
            events=base.events,
            failures=base.failures,
            inbox=member.holdings.inbox,
            before_save=prefetches.before_save,
        ),
        member.incarnation,
    )
    steps = StepCatalog(
        restore_parts,
        lambda: local_saves.last_complete,
        prefetches.before_removal,
        contextlib.nullcontext if preservation is None else preservation.held,
        saver.saved.forget,
    )
    return Assembly(
        local_saves, preservation, restore_parts, prefetches, saver, steps, probe, at_start
    )


def _open_persistent(config: Config, secret: RunSecret) -> PersistentTier | None:
    if config.require_signed and not secret.given:
        raise ConfigError(
            ["require_signed is set, but no secret is given (secret_file or ECKPT_SECRET)"]
        )
    if config.dir is None:
        return None
    return PersistentTier(
        config.dir,
        timeout_s=config.persistent_timeout_s,
        buffer_bytes=config.storage_buffer_bytes,
        orbax_item=config.orbax_item,
        compression=config.storage_compression,
        signing=step_signing(secret, required=config.require_signed),
    )


def _claim(base: Base, tier: PersistentTier) -> DirectoryClaim:
    config, run_id = base.config, base.config.run_name
    mine = RunRecord(run_id, run_id == run_id_of(tier.directory), base.member.incarnation)
    coordinator = base.member.coordinator
    known = functools.partial(known_lives, coordinator)
    return DirectoryClaim(tier, mine, known, take_over=config.take_over_dir)


def _reach(
    base: Base, tier: PersistentTier, claim: DirectoryClaim
) -> tuple[StorageProbe | None, ClaimAtStart | None]:
    """Return, at the leader of a job that saves to storage, the parts that test and claim it."""
    config = base.config
    if base.process[0] != 0:  # process 0 leads the writers
        return None, None
    timeout_s = config.start_timeout_s / 4
    probe = StorageProbe(
        tier, base.member.incarnation, base.events, min(_PROBE_TIMEOUT_S, timeout_s)
    )
    saves_there = "persistent" in config.save_plans()
    must_be_there = saves_there and config.require_storage
    deadline_s = time.monotonic() + timeout_s
    at_start = ClaimAtStart(claim, base.member.coordinator, base.events)
    try:
        if not must_be_there:  # the probe creates the directory
            tier.create(deadline_s)
        if saves_there:
            at_start.look(deadline_s)
    except (PersistentTierError, CorruptData) as error:
        # Storage may be down just when RAM is needed; saves try it again.
        base.events.emit("persistent.unreachable", reason=str(error))
        base.failures.record(error)
        return probe if must_be_there else None, at_start if saves_there else None
    # A job that only restores may have no permission to write.
    return (probe, at_start) if saves_there else (None, None)


def _local_saves(base: Base, timelines: Timelines) -> LocalSaves:
    config, member = base.config, base.member
    return LocalSaves(
        member.tier,
        Vote(member.coordinator, config.save_timeout_s, base.departures),
        member.peers,
        base.events,
        base.failures,
        process=base.process,
        host_state_limit_bytes=config.host_state_limit_bytes,
        copy_batch_bytes=config.copy_batch_bytes,
        timelines=timelines,
        preservation=config.local_preservation_policy,
    )


def _persistent_saves(
    base: Base, persistent: PersistentTier, storage: StorageTimeline
) -> PersistentSaves:
    config, member = base.config, base.member
    return PersistentSaves(
        persistent,
        member.coordinator,
        member.peers,
        member.holdings.inbox,
        base.events,
        base.failures,
        timeline=storage,
        host_state_limit_bytes=config.host_state_limit_bytes,
        timeout_s=config.persistent_timeout_s,
        departures=base.departures,
    )


def _preservation(
    base: Base, persistent: PersistentTier, timelines: Timelines, claim: DirectoryClaim
) -> Preservation:
    config = base.config
    return Preservation(
        StepRecords(persistent),
        base.events,
        base.failures,
        policy=config.preservation_policy,
        keep_last_n=config.keep_last_n,
        keep_every_n_steps=config.keep_every_n_steps,
        timelines=timelines,
        claim=claim,
        niceness=config.save_niceness,
    )


def _restore_parts(
    base: Base,
    persistent: PersistentTier | None,
    timelines: Timelines,
    storage: StorageTimeline | None,
    claim: DirectoryClaim | None,
) -> RestoreParts:
    member = base.member
    saves_there = "persistent" in base.config.save_plans()
    return RestoreParts(
        config=base.config,
        coordinator=member.coordinator,
        tier=member.tier,
        holdings=member.holdings,
        client=member.client,
        peers=member.peers,
        persistent=persistent,
        events=base.events,
        timelines=timelines,
        storage_timeline=storage if saves_there else None,
        claim=claim,
    )
