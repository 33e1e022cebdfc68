"""The start of a checkpointer on all processes together: its checks, and its parts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import connect, connect_start, own_address
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.left_processes import LeftProcesses, have_left
from emergency_ckpt.cluster.membership import (
    JobStart,
    Membership,
    agree_settings,
    secret_text,
    share_secret,
    tell_problem,
)
from emergency_ckpt.cluster.peers import Known, LostPeers, Peers, start_told
from emergency_ckpt.cluster.preemption import PreemptionWatch, find_notices
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.cluster.timelines import SOON_S, StoredChain, Timelines, told_of_wait
from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.config.validation import listeners_of
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.core.wording import unexpected_text
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    CorruptData,
    DirectoryInUse,
    PeerUnreachable,
    PersistentTierError,
    RestoreFailed,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.observer import JobView, Observer, StepProgress
from emergency_ckpt.restore.steps import StepCatalog
from emergency_ckpt.run_secret import own_secret
from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.save.save_work import TierSaves
from emergency_ckpt.save.saver import Saver
from emergency_ckpt.save.value_checks import FiniteLeaves
from emergency_ckpt.save.vote import Vote
from emergency_ckpt.state.link import Link
from emergency_ckpt.storage.directory import probe_storage
from emergency_ckpt.storage.directory_writer import DirectoryWriter
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import PERSISTENT

_PROBE_TIMEOUT_S = 20.0
_END_THREADS_S = 5.0
_LOOPBACK = "127.0.0.1"


def agreed_config(config: Config, settings: Mapping[str, Any]) -> tuple[Config, JobStart]:
    """Return the complete config, equal on all processes where it must be, and the start.

    From here until ``Membership`` the others are told of an error by ``start_told``, or they wait.

    Collective; ConfigError on all. CoordinationError: no address of this host leads to the
    coordinator; the others have ConfigError then.
    """
    coordinator = connect_start()
    try:
        config = config.set(**settings).validated()
        own = own_secret(config.secret_file, os.environ)
        host = own_address(config.bind_host)
    except (ConfigError, CoordinationError) as error:
        tell_problem(coordinator, error)
        raise
    shared = {**config.shared_settings(), "secret": secret_text(config.run_name, own)}
    name, outside = agree_settings(coordinator, shared, config.start_timeout_s, host)
    coordinator = connect(name)
    with start_told(coordinator):
        # Process 0 gives the others a secret before anything of its own can fail.
        secret = share_secret(coordinator, own, config.start_timeout_s)
    return config, JobStart(coordinator, name, secret, own is not None, host, outside)


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
    3. What saves (``saver``), restores (with ``job``) and lists ``steps``.
    4. All check what would show only at a loss or a save: ports, peers, storage (``_check``). Then
       the leader of a job that saves to storage claims the directory.
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
        with start_told(start.coordinator):
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
        self.watch = PreemptionWatch(None, grace_s=grace_s)
        self.left_processes = LeftProcesses(member.coordinator)
        try:
            member.begin_life()
            if config.heeds_preemption:
                notices = find_notices(member.coordinator, grace_s, events)
                self.watch = PreemptionWatch(notices, grace_s=grace_s)
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
        chain = self.job.stored_chain
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
        self.job = job = Job(
            config=config,
            process=process,
            coordinator=member.coordinator,
            tier=member.tier,
            holdings=member.holdings,
            client=member.client,
            peers=member.peers,
            persistent=None if storage is None else storage.tier,
            timelines=timelines,
            stored_chain=chain if self._saves_to_storage else None,
            watch=self.watch,
            events=self.events,
            failures=self.failures,
            progress=self.progress,
            inspect=LostPeers(member.coordinator, member.peers).inspect,
            link=self.link,
            buffers=self.buffers,
        )
        saves = TierSaves(local, stored, self.preservation, finite)
        self.saver = saver = Saver(job, saves, member.incarnation)
        self.steps = StepCatalog(
            job,
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
        steps: dict[str, Callable[[], None]] = {"opened": self._check}
        if self._saves_to_storage:
            steps["claimed"] = self._claim  # only now, when the checks of all have succeeded
        for name, work in steps.items():
            errors = run_on_all(self.member.coordinator, name, work, self.watch, limit_s)
            if errors:
                raise RestoreFailed("start", "the job", errors)

    def _claim(self) -> None:
        claim = None if self._storage is None else self._storage.claim
        if claim is not None:
            claim.finish(self.member.incarnation)

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


LAUNCHED_COUNT = "ECKPT_PROCESS_COUNT"
"""Number of processes that ``eckpt launch`` has started; set for each of them."""


def check_joined(process_count: int) -> None:
    """Raise ConfigError when a launcher has started more processes than JAX knows of, or fewer.

    Each would otherwise be a job of its own, all in one directory.
    """
    text = os.environ.get(LAUNCHED_COUNT, "")
    if not (text.isascii() and text.isdigit()) or int(text[:9]) == process_count:
        return
    raise ConfigError(
        [
            f"the launcher has started {int(text[:9])} processes ({LAUNCHED_COUNT}), but"
            f" jax.process_count() is {process_count}: call jax.distributed.initialize, or"
            " initialize_job of emergency_ckpt.tools.simulated_job, before anything else; a"
            f" program that is no part of the job must not have {LAUNCHED_COUNT} in its environment"
        ]
    )


_NO_THREADS_AT_THE_END = (3, 12), (3, 12, 3)
"""Python from the first to before the second starts no thread once the program has ended."""


def config_warnings(config: Config) -> list[str]:
    """Return a line for each setting of the job that is probably a mistake. Not collective."""
    warnings: list[str] = []
    first, fixed = _NO_THREADS_AT_THE_END
    if first <= tuple(sys.version_info[:3]) < fixed:
        warnings.append(
            "Python 3.12.0 to 3.12.2 starts no thread at the end of a program (CPython's issue"
            " 113964): end the checkpointer by `stop` or a `with` block, or a save that is still"
            " under way at the end is lost"
        )
    if not config.save_plans():
        warnings.append(
            "neither tier saves: no interval and no policy is set; this job can only restore"
        )
    return warnings


def neighbours(process: int, count: int) -> list[int]:
    """Return the processes before and after ``process`` in a ring of ``count``, without itself."""
    return sorted({(process - 1) % count, (process + 1) % count} - {process})


class PeerProbe:
    """Handshakes with this process's neighbours, all at once, from construction on.

    Each process is greeted by two others, however many there are: an address that others cannot
    reach would show only at a save or a loss.

    Args:
      process: (index, count) of this one.
      timeout_s: maximum duration of all of them together.
      on_failure: called by a thread of the probe with each neighbour that cannot be reached.
    """

    def __init__(
        self,
        peers: Peers,
        process: tuple[int, int],
        timeout_s: float,
        on_failure: Callable[[int, PeerUnreachable], None] | None = None,
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._deadline_s = time.monotonic() + timeout_s
        self._errors: dict[int, CheckpointError | None] = {}
        self._addresses: dict[int, str] = {}
        # Daemons, because a name service may block for longer than any of our deadlines.
        self._threads = {
            peer: threading.Thread(
                target=self._greet, args=(peer,), name=f"eckpt-greeting-{peer}", daemon=True
            )
            for peer in neighbours(*process)
        }
        for thread in self._threads.values():
            thread.start()

    def finish(self) -> None:
        """Wait for the answers until the deadline.

        PeerUnreachable when one did not answer, or did not prove that it knows the run's secret.
        """
        for peer, thread in self._threads.items():
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
            silence = f"no answer within {self._timeout_s:g} s"
            no_answer = CheckpointError("greet", f"process {peer}", silence)
            error = self._errors.get(peer, no_answer)
            if error is not None:
                raise self._unreachable(peer, error)

    def _greet(self, peer: int) -> None:
        try:
            address = self._addresses[peer] = self._peers.address_of(peer)
            self._peers.client.greet(address, self._timeout_s)
            self._errors[peer] = None
        except CheckpointError as error:
            self._errors[peer] = error
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            text = unexpected_text(error)
            self._errors[peer] = CheckpointError("greet", f"process {peer}", text)
        error = self._errors[peer]
        if error is not None and self._on_failure is not None:
            self._on_failure(peer, self._unreachable(peer, error))

    def _unreachable(self, peer: int, error: CheckpointError) -> PeerUnreachable:
        return PeerUnreachable(
            "start",
            f"process {peer} at {self._addresses.get(peer, 'an unknown address')}",
            f"it cannot be reached from this process: {error}",
            hint="set bind_host there to an address that the other hosts reach, and open its port"
            " (bind_port) between all hosts of the job",
        )


_WRITE_TIMEOUT_S = 5.0
"""Short, because all processes wait for it."""


class ClaimAtStart:
    """The leader's part of a start: an inspection first, and the claim after all succeeded."""

    def __init__(
        self,
        writer: DirectoryWriter,
        events: EventSink,
        failures: Failures,
        *,
        saves_there: bool,
        deadline_s: float,
    ) -> None:
        """``saves_there``: the job saves to storage, so no other run may."""
        self._deadline_s = deadline_s
        self._writer = writer
        self._events = events
        self._failures = failures
        self._saves_there = saves_there
        self._refusal: DirectoryInUse | None = None
        self.has_read = False

    def inspect(self, directory: str, create: Callable[[float], None] | None) -> Known:
        """Read the log; return what it knows of the run. Blocks for storage.

        Never raises, because RAM may be enough. ``create``: makes the directory until a deadline.
        """
        try:
            with told_of_wait(self._events, directory, self._deadline_s):
                if create is not None:
                    create(self._deadline_s)
                try:
                    self._writer.find(self._deadline_s)
                    self._tell_other_name(directory)
                except DirectoryInUse as error:
                    self._refusal = error if self._saves_there else None
                known = Known(*self._writer.known(self._deadline_s))
        except (PersistentTierError, CorruptData) as error:
            # Storage may be down just when RAM is needed; saves try it again.
            self._events.emit("persistent.problem", cause="unreachable", reason=str(error))
            self._failures.record(error)
            return Known(unread=str(error))
        self.has_read = True
        return known

    def _tell_other_name(self, directory: str) -> None:
        """Warn where this run had another name, because its directory had another path."""
        there = self._writer.table
        if there is not None and there.run_id != self._writer.run_id and there.from_dir:
            text = (
                f"{directory} had another path: run {there.run_id!r} saved there, and this is run"
                f" {self._writer.run_id!r}, for which what is in RAM under that name does not"
                f" count; set run_id={there.run_id!r} to restore it"
            )
            self._events.emit("warning", cause="setting", text=text)

    def check(self) -> None:
        """Raise DirectoryInUse when another run has the claim."""
        if self._refusal is not None:
            raise self._refusal

    def finish(self, incarnation: str) -> None:
        """Claim a directory that no run has; in one of this run take this incarnation's number.

        DirectoryInUse when another run has just claimed it. Call last, when all processes have
        checked, because a start that fails must not keep a directory from other runs. A storage
        failure now is left to the saves.
        """
        if self.has_read and self._saves_there:
            try:
                self._writer.enter(incarnation, time.monotonic() + _WRITE_TIMEOUT_S)
            except DirectoryInUse:  # a PersistentTierError, too
                raise
            except (PersistentTierError, CorruptData) as error:
                self._events.emit(
                    "persistent.problem", cause="unreachable", reason=str(error)[:500]
                )
