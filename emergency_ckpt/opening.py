"""The start of a checkpointer on all processes together, and the parts that it consists of."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import connect_start, own_address
from emergency_ckpt.cluster.left_processes import LeftProcesses, have_left
from emergency_ckpt.cluster.membership import JobStart, Membership
from emergency_ckpt.cluster.peers import Known, LostPeers
from emergency_ckpt.cluster.preemption import PreemptionWatch, find_notices
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.cluster.start_agreement import agree_settings, secret_text, tell_problem
from emergency_ckpt.cluster.timelines import SOON_S, StoredChain, Timelines
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.config.validation import listeners_of
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    PeerUnreachable,
    RestoreFailed,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.observer import JobView, Observer, StepProgress
from emergency_ckpt.restore.request import RestoreParts
from emergency_ckpt.restore.steps import StepCatalog
from emergency_ckpt.run_secret import own_secret
from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.save.save_work import SaverParts
from emergency_ckpt.save.saver import Saver
from emergency_ckpt.save.value_checks import FiniteLeaves
from emergency_ckpt.save.vote import Vote
from emergency_ckpt.start import (
    ClaimAtStart,
    PeerProbe,
    config_warnings,
)
from emergency_ckpt.state.link import Link
from emergency_ckpt.storage.probe import probe_storage
from emergency_ckpt.storage.steps.writer import DirectoryWriter
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import PERSISTENT

_PROBE_TIMEOUT_S = 20.0
_END_THREADS_S = 5.0
_LOOPBACK = "127.0.0.1"


def agreed_config(config: Config, settings: Mapping[str, Any]) -> tuple[Config, JobStart]:
    """Return the complete config, equal on all processes where it must be, and the start.

    Collective; ConfigError on all. CoordinationError: no address of this host leads to the
    coordinator; the others have ConfigError then.
    """
    coordinator = connect_start()
    try:
        config = config.set(**settings).validated()
        secret = own_secret(config.secret_file, os.environ)
        host = own_address(config.bind_host)
    except (ConfigError, CoordinationError) as error:
        tell_problem(coordinator, error)
        raise
    shared = {**config.shared_settings(), "secret": secret_text(config.run_name, secret)}
    name, outside = agree_settings(coordinator, shared, config.start_timeout_s, host)
    return config, JobStart(name, secret, host, outside)


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The persistent directory on one process.

    Attributes:
      claim: at the leader, the inspection of its step log at the start; None on other processes.
    """

    tier: PersistentTier
    writer: DirectoryWriter
    claim: ClaimAtStart | None


class Opened:
    """One process's place in a running job, and the parts that a checkpointer consists of there.

    The constructor is collective, blocks, and succeeds on all processes or on none:

    1. ``member``: the secret, the ramdisk, the server for peers, an incarnation for all; the leader
       inspects storage meanwhile.
    2. ``watch`` and ``left_processes``: notices of a preemption, processes that leave.
    3. What saves (``saver``), restores (``restore_parts``) and lists ``steps``.
    4. All check what would show only at a loss or a save: ports, peers, storage (``_check``).
    5. ``observers`` of ``on_event`` meet the job.

    Raises as ``Membership``; DirectoryInUse on all; LocalTierError and, with "storage" in
    ``require``, PersistentTierError, with "peers", PeerUnreachable on the failing process,
    RestoreFailed on the others.

    Attributes:
      process: (index, count) of this one.
      preservation: None without a directory.
      progress: of the training loop, for observers.
    """

    def __init__(
        self,
        config: Config,
        start: JobStart,
        process: tuple[int, int],
        buffers: Buffers,
        link: Link,
    ) -> None:
        """``link``: between devices and host memory."""
        self.config, self.process, self.buffers, self.link = config, process, buffers, link
        self.failures = Failures()
        self.progress = StepProgress()
        self._observers: list[Observer] = []
        self._joined: list[tuple[Observer, JobView]] = []
        self.events = _sink(config, process[0], self._observers)
        try:
            self._open(start)
        except BaseException:
            self.events.close()
            raise

    def _open(self, start: JobStart) -> None:
        config, process, events = self.config, self.process, self.events
        for text in config_warnings(config) if process[0] == 0 else ():
            events.emit("warning", cause="setting", text=text)
        events.emit("start.link", **dataclasses.asdict(self.link.facts))
        self._storage: _Storage | None = None
        self.member = member = Membership(
            config, process, start, events, self._look_at_storage, self.link.mapper
        )
        grace_s = config.preemption_grace_s
        heeds = config.heeds_preemption
        notices = find_notices(member.coordinator, grace_s, events) if heeds else None
        self.watch = PreemptionWatch(notices, grace_s=grace_s)
        self.left_processes = LeftProcesses(member.coordinator)
        try:
            if process[0] != 0:
                self._storage = self._open_storage()
            events.locate(incarnation=member.incarnation)
            self._assemble()
            try:
                self._check_on_all()
            except BaseException:
                self.saver.ending.end_threads(_END_THREADS_S)
                raise
        except BaseException as error:
            self.expect_no_step()
            self._leave(text_of(error))
            raise

    # Its end.

    def expect_no_step(self) -> None:
        """Tell the others that this process makes no more steps. Idempotent; not collective."""
        for observer, view in self._joined:
            observer.leave(view)

    def tell_begins_anew(self) -> None:
        """Warn where a job begins from nothing although its run is on record. At the leader."""
        config, lives = self.config, number_of(self.member.incarnation) - 1
        if self.process[0] != 0 or lives < 1 or config.only_reads:
            return
        text = (
            f"training begins anew although run {config.run_name} has been started before (its"
            f" lives up to {lives} are on record): no step of it is in RAM or in"
            f" {config.dir or config.local_dir}. A run that ends by an error before its first save"
            " leaves none"
        )
        self.events.emit("warning", cause="setting", text=text)

    def note_orderly_end(self) -> None:
        """Record that nothing ended this life. Not collective; blocks for storage for a moment."""
        self.member.tier.note_orderly_end()
        chain = self.restore_parts.stored_chain
        if chain is not None and self.process[0] == 0:
            chain.note_orderly_end()

    def release(self, reason: str, error: BaseException | None = None) -> None:
        """Release ramdisk, port and threads, and tell the others ``reason``. Not collective.

        The end of the event log is written, which a silent file server delays by 5 s.

        Args:
          error: the exception that has ended training; None after any other end.
        """
        self.expect_no_step()
        self._leave(reason)
        cause, why = ("finished", reason) if error is None else ("error", text_of(error))
        self.events.emit("stop", cause=cause, step=self.progress.read().step, reason=why)
        self.events.close()

    def _leave(self, reason: str) -> None:
        self.left_processes.gone(reason)
        self.watch.close()
        self.member.leave()

    # Storage.

    def _open_storage(self) -> _Storage | None:
        """Return the persistent directory; None without one. Does not block."""
        config = self.config
        if config.dir is None:
            return None
        tier = PersistentTier(
            config.dir,
            timeout_s=config.time_limits.patience_s,
            buffer_bytes=self.buffers.storage_bytes,
            orbax_item=config.orbax.item,
            step_name=config.orbax.step_name,
        )
        writer = self._writer_of(tier)
        if self.process[0] != 0:
            return _Storage(tier, writer, None)
        tier.writer = writer
        claim = ClaimAtStart(
            writer,
            self.events,
            self.failures,
            saves_there=self._saves_to_storage,
            deadline_s=time.monotonic() + config.start_timeout_s / 4,
        )
        return _Storage(tier, writer, claim)

    def _writer_of(self, tier: PersistentTier) -> DirectoryWriter:
        config = self.config
        return DirectoryWriter(
            tier.storage,
            tier.found,
            run_id=config.run_name,
            from_dir=config.run_name == run_id_of(tier.directory),
            emit=self.events.emit,
        )

    @property
    def _saves_to_storage(self) -> bool:
        return PERSISTENT in self.config.save_plans()

    def _look_at_storage(self) -> Known:
        """Return what storage knows of the run: at the leader of a start. Blocks for storage."""
        self._storage = storage = self._open_storage()
        if storage is None or storage.claim is None:
            return Known()
        # Where ``require`` names storage, the probe makes the directory.
        is_probed = self._saves_to_storage and "storage" in self.config.require
        create = None if self.config.only_reads or is_probed else storage.tier.create
        return storage.claim.inspect(storage.tier.directory, create)

    # The parts.

    def _assemble(self) -> None:
        config, process, member, storage = self.config, self.process, self.member, self._storage
        finite = FiniteLeaves(self.events, config.non_finite)
        timelines = Timelines(
            member.tier,
            self.events,
            member.newest_step,
            member.complete,
            self.tell_begins_anew,
            unread=member.unread,
        )
        chain, stored = self._storage_parts(timelines)
        local = LocalSaves(
            member.tier,
            Vote(member.coordinator, config.save_timeout_s, self.left_processes),
            member.peers,
            self.events,
            self.failures,
            process=process,
            copy_batch_bytes=self.buffers.copy_batch_bytes,
            timelines=timelines,
            drops_older=config.orbax.drops_older_steps,
            keep_last_n=config.local_keep_last_n,
            finite=finite,
        )
        self.restore_parts = RestoreParts(
            config=config,
            process=process,
            coordinator=member.coordinator,
            tier=member.tier,
            holdings=member.holdings,
            client=member.client,
            peers=member.peers,
            persistent=None if storage is None else storage.tier,
            events=self.events,
            timelines=timelines,
            stored_chain=chain if self._saves_to_storage else None,
            link=self.link,
        )
        self.saver = saver = Saver(
            SaverParts(
                config=config,
                process=process,
                buffers=self.buffers,
                coordinator=member.coordinator,
                tier=member.tier,
                local=local,
                persistent=stored,
                preservation=self.preservation,
                watch=self.watch,
                timelines=timelines,
                events=self.events,
                progress=self.progress,
                failures=self.failures,
                finite=finite,
                link=self.link,
                inspect=LostPeers(member.coordinator, member.peers).inspect,
            ),
            member.incarnation,
        )
        self.steps = StepCatalog(
            self.restore_parts,
            (member.tier,) if storage is None else (member.tier, storage.tier),
            self.held_steps,
            saver.forget,
            lambda: saver.saved.incarnation,
        )

    def _storage_parts(
        self, timelines: Timelines
    ) -> tuple[StoredChain | None, PersistentSaves | None]:
        """Return what saves to storage, where there is a directory; also set ``preservation``."""
        config, member, storage = self.config, self.member, self._storage
        self.preservation: Preservation | None = None
        if storage is None:
            return None, None
        soon = storage.tier.with_timeout(SOON_S)
        chain = StoredChain(storage.writer, lambda: self._writer_of(soon), timelines, self.events)
        self.preservation = Preservation(
            storage.writer,
            self.failures,
            policy=config.preservation_policy,
            keep_last_n=config.keep_last_n,
            keep_every_n_steps=config.keep_every_n_steps,
            timelines=timelines,
            timeout_s=config.time_limits.patience_s,
        )
        stored = PersistentSaves(
            storage.tier,
            member.coordinator,
            member.peers,
            member.holdings.inbox,
            self.events,
            self.failures,
            chain=chain,
            limits=config.time_limits,
            left_processes=self.left_processes,
            preservation=self.preservation,
        )
        return chain, stored

    def held_steps(self) -> contextlib.AbstractContextManager[None]:
        """Keep persistent steps from being removed while inside."""
        return self.preservation.held() if self.preservation else contextlib.nullcontext()

    # The checks.

    def _check_on_all(self) -> None:
        # Also so that no process's restore timeout runs while the leader waits for storage.
        limit_s = self.config.start_timeout_s
        errors = run_on_all(self.member.coordinator, "opened", self._check, self.watch, limit_s)
        if errors:
            raise RestoreFailed("start", "the job", errors)

    def _check(self) -> None:
        """Check what ``require`` names; `eckpt doctor` checks the rest before a start."""
        config, member, storage = self.config, self.member, self._storage
        claim = None if storage is None else storage.claim
        host = config.bind_host or _LOOPBACK
        view = JobView(member.coordinator, self.events, self.progress, host, self.watch.request)
        for observer in self._observers:
            self._joined.append((observer, view))
            observer.join(view)
        if claim is not None:
            claim.check()
        are_required = "peers" in config.require
        on_failure = None if are_required else self._warn_of_peer
        timeout_s = config.start_timeout_s / 2
        peer_probe = PeerProbe(member.peers, self.process, timeout_s, on_failure)
        must_take_files = "storage" in config.require and self._saves_to_storage
        if storage is not None and claim is not None and must_take_files:
            deadline_s = time.monotonic() + min(_PROBE_TIMEOUT_S, config.start_timeout_s / 4)
            probe_storage(storage.tier.storage, member.incarnation, deadline_s)
        member.adopt_orphans()
        if are_required:
            peer_probe.finish()
        if claim is not None:
            claim.finish(member.incarnation)

    def _warn_of_peer(self, peer: int, error: PeerUnreachable) -> None:
        """Warn of a peer that cannot be reached, unless it or this process has ended meanwhile."""
        try:
            has_ended = bool(have_left(self.member.coordinator, [peer, self.process[0]]))
        except CheckpointError:
            return  # the job ends, or says itself that its service is gone
        if not has_ended:
            self.events.emit("warning", cause="setting", text=str(error))


def _sink(config: Config, me: int, observers: list[Observer]) -> EventSink:
    """Return the sink of events; ``observers`` gets those of ``on_event`` that are observers."""
    listeners = listeners_of(config.on_event)
    watching = [listener for listener in listeners if isinstance(listener, Observer)]
    events = EventSink(
        *(listener for listener in listeners if not isinstance(listener, Observer)),
        process_index=me,
    )
    events.locate(run_id=config.run_name)
    try:
        for observer in watching:
            observer.begin(me)
            events.on_close(observer.close)
            events.add(observer)
            observers.append(observer)
    except BaseException:
        events.close()
        raise
    return events


def text_of(error: BaseException) -> str:
    """Return ``error`` in one line of bounded length."""
    return f"{type(error).__name__}: {str(error)[:500]}"
