"""Builds the parts of a checkpointer from its config. No behaviour of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator, connect_start
from emergency_ckpt.cluster.departures import Departures
from emergency_ckpt.cluster.membership import Membership
from emergency_ckpt.cluster.peer_signs import DeathWatch
from emergency_ckpt.cluster.peers import Known
from emergency_ckpt.cluster.preemption.sources import open_sources
from emergency_ckpt.cluster.preemption.watch import PreemptionWatch, find_notices
from emergency_ckpt.cluster.start_agreement import agree_settings, tell_problem
from emergency_ckpt.cluster.stored_chain import SOON_S, StoredChain
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.secret.derived_keys import RunSecret
from emergency_ckpt.core.secret.step_signature import step_signing
from emergency_ckpt.errors import ConfigError
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
from emergency_ckpt.start.claim import ClaimAtStart
from emergency_ckpt.start.storage_probe import StorageProbe
from emergency_ckpt.tiers.persistent.steps.writer import DirectoryWriter
from emergency_ckpt.tiers.persistent.tier import PersistentTier

_PROBE_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Base:
    """The base of all other parts.

    Attributes:
      process: (index, count) of this one.
      storage: None without a directory.
    """

    config: Config
    process: tuple[int, int]
    buffers: Buffers
    member: Membership
    watch: PreemptionWatch
    events: EventSink
    failures: Failures
    departures: Departures
    storage: Storage | None
    deaths: DeathWatch


@dataclasses.dataclass(frozen=True)
class Storage:
    """The persistent directory on one process.

    Attributes:
      claim: at the leader, the look at its step log at the start; None on other processes.
    """

    tier: PersistentTier
    writer: DirectoryWriter
    claim: ClaimAtStart | None


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts that a checkpointer's methods use.

    Attributes:
      preservation: None without a directory.
      probe: None without a test of storage: no saves there, it just failed, or another process
        tests it.
      claim: as in ``Storage``.
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
    """Build all parts."""
    storage = base.storage
    persistent = None if storage is None else storage.tier
    timelines = Timelines(base.member.tier, base.events, base.member.newest_step)
    chain: StoredChain | None = None
    preservation: Preservation | None = None
    if storage is not None:
        soon = storage.tier.with_timeout(SOON_S)
        chain = StoredChain(
            storage.writer,
            lambda: new_writer(base.config, soon, base.events),
            timelines,
            base.events,
        )
        preservation = _preservation(base, storage.writer, timelines)
    local_saves = _local_saves(base, timelines)
    restore_parts = _restore_parts(base, persistent, timelines, chain)
    prefetches = Prefetches(restore_parts)
    member = base.member
    saver = Saver(
        SaverParts(
            config=base.config,
            process=base.process,
            buffers=base.buffers,
            coordinator=member.coordinator,
            tier=member.tier,
            local=local_saves,
            persistent=None
            if persistent is None or chain is None
            else _persistent_saves(base, persistent, chain),
            preservation=preservation,
            watch=base.watch,
            timelines=timelines,
            events=base.events,
            failures=base.failures,
            inbox=member.holdings.inbox,
            before_save=prefetches.before_save,
            look=base.deaths.look,
        ),
        member.incarnation,
    )
    steps = StepCatalog(
        restore_parts,
        lambda: local_saves.last_complete,
        prefetches.before_removal,
        contextlib.nullcontext if preservation is None else preservation.held,
        saver.forget,
        lambda: saver.saved.incarnation,
        storage.writer if storage is not None and base.process[0] == 0 else None,
    )
    return Assembly(
        local_saves,
        preservation,
        restore_parts,
        prefetches,
        saver,
        steps,
        _probe(base),
        None if storage is None else storage.claim,
    )


def open_storage(
    config: Config,
    process: tuple[int, int],
    secret: RunSecret,
    buffers: Buffers,
    events: EventSink,
    failures: Failures,
) -> Storage | None:
    """Return the persistent directory; None without one. Does not block."""
    if config.dir is None:
        return None
    tier = PersistentTier(
        config.dir,
        timeout_s=config.persistent_timeout_s,
        buffer_bytes=buffers.storage_bytes,
        orbax_item=config.orbax_item,
        compression=config.storage_compression,
        signing=step_signing(secret, required="signed" in config.require),
    )
    writer = new_writer(config, tier, events)
    if process[0] != 0:
        return Storage(tier, writer, None)
    claim = ClaimAtStart(
        writer,
        events,
        failures,
        saves_there=saves_to_storage(config),
        deadline_s=time.monotonic() + config.start_timeout_s / 4,
    )
    return Storage(tier, writer, claim)


def saves_to_storage(config: Config) -> bool:
    """Return whether the job saves to storage."""
    return "persistent" in config.save_plans()


def look_at_storage(config: Config, storage: Storage | None) -> Known:
    """Return what storage knows of the run: at the leader of a start. Blocks for storage."""
    if storage is None or storage.claim is None:
        return Known()
    # The probe makes the directory where it must be there.
    is_probed = saves_to_storage(config) and "storage" in config.require

    def create(deadline_s: float) -> None:
        if not is_probed:
            storage.tier.create(deadline_s)

    return storage.claim.look(storage.tier.directory, create)


def new_writer(config: Config, tier: PersistentTier, events: EventSink) -> DirectoryWriter:
    """Return a writer of the log of ``tier`` for this run."""
    return DirectoryWriter(
        tier.storage,
        tier.found,
        run_id=config.run_name,
        from_dir=config.run_name == run_id_of(tier.directory),
        take_over=config.take_over_dir,
        events=events,
    )


def _probe(base: Base) -> StorageProbe | None:
    """Return the test of storage at the leader of a job that saves there.

    A job that only restores may have no permission to write. Storage that has just failed is tested
    only where it must be there.
    """
    config, storage = base.config, base.storage
    if storage is None or storage.claim is None or not saves_to_storage(config):
        return None
    if not storage.claim.has_read and "storage" not in config.require:
        return None
    timeout_s = min(_PROBE_TIMEOUT_S, config.start_timeout_s / 4)
    return StorageProbe(storage.tier, base.member.incarnation, base.events, timeout_s)


def _local_saves(base: Base, timelines: Timelines) -> LocalSaves:
    config, member = base.config, base.member
    return LocalSaves(
        member.tier,
        Vote(member.coordinator, config.save_timeout_s, base.departures),
        member.peers,
        base.events,
        base.failures,
        process=base.process,
        copy_batch_bytes=base.buffers.copy_batch_bytes,
        timelines=timelines,
        preservation=config.local_preservation_policy,
    )


def _persistent_saves(
    base: Base, persistent: PersistentTier, chain: StoredChain
) -> PersistentSaves:
    config, member = base.config, base.member
    return PersistentSaves(
        persistent,
        member.coordinator,
        member.peers,
        member.holdings.inbox,
        base.events,
        base.failures,
        chain=chain,
        timeout_s=config.persistent_timeout_s,
        departures=base.departures,
    )


def _preservation(base: Base, writer: DirectoryWriter, timelines: Timelines) -> Preservation:
    config = base.config
    return Preservation(
        writer,
        base.events,
        base.failures,
        policy=config.preservation_policy,
        keep_last_n=config.keep_last_n,
        keep_every_n_steps=config.keep_every_n_steps,
        timelines=timelines,
        timeout_s=config.persistent_timeout_s,
    )


def _restore_parts(
    base: Base,
    persistent: PersistentTier | None,
    timelines: Timelines,
    chain: StoredChain | None,
) -> RestoreParts:
    member = base.member
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
        stored_chain=chain if saves_to_storage(base.config) else None,
    )
