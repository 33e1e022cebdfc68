"""The membership of one process in a job: first agreements, ramdisk, server, and peers.

All processes agree on equal settings, a name for the start, and the run's secret. The round of the
settings precedes all work that depends on a setting. Otherwise a job in which ``dir`` differs would
wait in two places for processes that never come there.

The run's secret is the secret that all processes were given, which the round compares by
``secret_text``, or a random one of process 0. A random secret passes through JAX's coordination
service in the clear. An attacker who can read in that service can read the secret; one who can
write there controls the job in any case. JAX's own mTLS closes the service (docs/security.md).
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from emergency_ckpt.background import copy_threads
from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    decode_each,
    decode_message,
    forget,
    joined_errors,
    route_to,
)
from emergency_ckpt.cluster.peers import Known, Peers, agree_start, start_told
from emergency_ckpt.cluster.round import Answer, Round, nobody, wait_for_key
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.config import Config
from emergency_ckpt.core.address import outside_hosts, reachable_host
from emergency_ckpt.core.wording import processes_text, valid_text
from emergency_ckpt.errors import CheckpointError, ConfigError, CoordinationError, DeadlineExceeded
from emergency_ckpt.events import EventSink
from emergency_ckpt.paths import resolved
from emergency_ckpt.ram.leftovers import GRACE_S, LeftRun, OtherRuns, greatest_number
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.run_secret import OwnSecret, check_secret, generate_secret, stretched
from emergency_ckpt.state.mapped import Mapper
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import Writer

_PART_TO_WAIT = 0.7
"""Share of the start's deadline that may be spent waiting for an earlier incarnation.

The others must see the failure before their own deadlines."""


class JobStart(NamedTuple):
    """The facts of a start that are known before the processes join.

    Attributes:
      coordinator: in the namespace of this start.
      name: the name from ``agree_settings``.
      secret: the run's secret, which all processes have.
      is_given: the secret was given to all processes; else process 0 has made the secret up.
      host: numeric address on which this process would serve its peers.
      outside: from ``agree_settings``: hosts whose processes cannot reach a loopback address.
    """

    coordinator: Coordinator
    name: str
    secret: bytes
    is_given: bool
    host: str
    outside: tuple[str, ...]


class Membership:
    """Joins the job on construction: collective, on all processes or on none.

    Attributes:
      incarnation: its name, which the leader has chosen, and which this process's RAM records.
      newest_step: the newest step that any process, or storage, knew of; -1 without any.
      complete: the newest save that any process had on record in RAM as complete on all.

    Raises:
      LocalTierError: on the failing process. RestoreFailed: on the others.
      DeadlineExceeded: a process did not come.
    """

    def __init__(
        self,
        config: Config,
        process: tuple[int, int],
        start: JobStart,
        events: EventSink,
        stored: Callable[[], Known],
        mapper: Mapper | None = None,
    ) -> None:
        """Join the job.

        Args:
          stored: returns what storage knows of the run; called at the leader, once all have come.
          mapper: maps slots for the devices' DMA.
        """
        me, count = process
        self._events = events
        self._mapper = mapper
        self._config = config
        self._wait_s = _PART_TO_WAIT * config.start_timeout_s
        self._start = start
        run_id = self._run_id = config.run_name
        self._writer = Writer(
            process_index=me,
            process_count=count,
            slice_index=0,  # until the state is known
            hostname=socket.gethostname(),
        )
        self._server: TransferServer | None = None
        self._tier: LocalTier | None = None
        self._scratch_dir: Path | None = None
        self.coordinator = start.coordinator
        with start_told(self.coordinator):
            if not start.is_given and count > 1 and me == 0:
                events.emit("warning", cause="setting", text=MADE_UP)
            self.client = TransferClient(
                run_id=run_id, secret=start.secret, io_timeout_s=config.transfer_timeout_s
            )
            self.peers = Peers(self.coordinator, self.client)
        try:
            started = agree_start(
                self.coordinator, self._start_serving, config.start_timeout_s, stored
            )
        except BaseException:
            self.leave()
            raise
        self.incarnation, self.newest_step = started.incarnation, started.newest_step
        self.complete = started.complete
        self.unread = started.unread

    def begin_life(self) -> None:
        """Record the incarnation in RAM, after all have joined.

        LocalTierError, on this process alone.
        """
        self.tier.note_incarnation(self.incarnation)
        forget_secret(self.coordinator)  # all processes have read it

    def adopt_orphans(self) -> None:
        """Serve the saves of this run that are left in RAM. Call after all have joined.

        By then all processes have claimed their directories. So each other directory belongs to no
        process, or to an earlier incarnation, whose end this method waits for. LocalTierError, on
        this process alone.
        """
        self.tier.adopt_orphans(self._wait_s)

    @property
    def tier(self) -> LocalTier:
        """This process's ramdisk directory."""
        assert self._tier is not None, "the constructor opens it or raises"
        return self._tier

    def _start_serving(self) -> tuple[str, Known]:
        """Claim the ramdisk and serve it; return this process's address, and what RAM knows."""
        config, local_dir = self._config, self._ensure_local_dir()
        routes = [(host, route_to(host)) for host in self._start.outside]
        is_given = config.bind_host is not None
        bind_host = reachable_host(self._start.host, routes, is_given=is_given)
        self._tier = LocalTier(
            local_dir,
            self._run_id,
            self._writer,
            copy_threads=copy_threads(),
            slots=config.local_keep_last_n + 1,
            start=self._start.name,
            wait_s=self._wait_s,
            other_runs=OtherRuns(local_dir, self._run_id, GRACE_S, self._tell_removed),
            mapper=self._mapper,
            on_refused=self._tell_refused,
        )
        # A restore needs the pages of earlier slots, whether it reads or receives.
        self._tier.map_newest_in_background()
        self.holdings = ProcessHoldings(self._tier, self._writer.process_index)
        self._server = TransferServer(
            self.holdings,
            run_id=self._run_id,
            secret=self._start.secret,
            bind_host=bind_host,
            port=0 if config.only_reads else config.bind_port,
            io_timeout_s=config.transfer_timeout_s,
        )
        self.holdings.address = self._server.contact
        self._server.start()
        inventory = self.holdings.inventory()
        # The directories that this process may adopt later, when all have come, have records of
        # incarnations too.
        nearby = greatest_number(local_dir / self._run_id)
        greatest = max(inventory.greatest, nearby)
        knowledge = Known(greatest, inventory.newest_step, inventory.known_complete)
        return self._server.contact, knowledge

    def _ensure_local_dir(self) -> Path:
        """Return the directory of runs in RAM, of which this process claims its part.

        The directories of a run belong to the job that saves. So each process of a job that only
        reads, which keeps no step in RAM, makes its own directory elsewhere, for small files.
        """
        if not self._config.only_reads:
            return Path(resolved(self._config.local_dir))
        self._scratch_dir = Path(tempfile.mkdtemp(prefix="eckpt-reading-"))
        return self._scratch_dir

    def _tell_refused(self, reason: str) -> None:
        text = f"saves and restores are slower, since slots are not mapped for DMA: {reason}"
        self._events.emit("warning", cause="setting", text=text)

    def _tell_removed(self, run: LeftRun) -> None:
        age_s = round(run.age_s(time.time()))
        self._events.emit(
            "ramdisk.run_removed", run=run.run_id, size_bytes=run.size_bytes, age_s=age_s
        )

    def leave(self) -> None:
        """Release port and ramdisk; the saved bytes stay. Not collective. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self.client.close()
        if self._tier is not None:
            self._tier.close()
        if self._scratch_dir is not None:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)


_DIFFER_S = 5.0
"""Time for the second round, where the first round has taken the whole timeout."""
_MOST_LINES = 20
_KEY = "secret"
MADE_UP = (
    "no secret is given, so process 0 made one up and gave it to the others through JAX's"
    " coordination service, where anyone who reaches the coordinator's port can read it. Set"
    ' secret_file or ECKPT_SECRET, and require={"secret"} to refuse a start without one'
)
"""Warning of a job of several processes without a given secret."""


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    problem: str
    host: str = ""


class _Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``differ``: each process must publish its settings. ``start``: the name, on success."""

    start: str = ""
    error: str = ""
    differ: bool = False
    outside: tuple[str, ...] = ()


def tell_problem(coordinator: Coordinator, error: CheckpointError) -> None:
    """Report to the others that this process's settings are invalid, so that they do not wait.

    Does not block. A coordination error is not raised, because the caller's error matters more.
    """
    problem = valid_text(str(error), ERROR_LIMIT_CHARS)
    try:
        settings_round = _round(coordinator, "settings", 0.0)
        settings_round.say(msgspec.json.encode(_Hello("", problem)))
        if coordinator.process_index == 0:
            settings_round.tell(msgspec.json.encode(_Decision(error=f"process 0: {problem}")))
    except CoordinationError as failure:
        error.add_note(f"The other processes got no report of this: {failure}")


def agree_settings(
    coordinator: Coordinator, own: Mapping[str, str], timeout_s: float, host: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Begin a start of the job. Collective; blocks.

    Args:
      own: text of each setting that must be equal on all processes.
      host: numeric address on which this process would serve its peers.

    Returns:
      A unique name of this start, and the hosts of the job that cannot reach a loopback address
      (``core.address.outside_hosts``).

    Raises:
      ConfigError: a setting differs, or is invalid on some process; raised on all of them once the
        last process has come. DeadlineExceeded: a process did not come; the error names the
        process.
    """
    deadline_s = time.monotonic() + timeout_s
    text = msgspec.json.encode(dict(own), order="sorted")
    hello = _Hello(hashlib.sha256(text).hexdigest(), "", host)
    settings_round = _round(coordinator, "settings", timeout_s)
    try:
        data = settings_round.hold(
            msgspec.json.encode(hello), lambda said, _: _answer(settings_round, said)
        )
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            "start",
            "the job",
            f"not all processes came within {timeout_s:g} s",
            missing=error.missing,
            more=error.more,
            hint="look at the logs of the missing processes",
        ) from error
    decision: _Decision = decode_message(data, _Decision, "settings.told, process 0")
    if decision.differ:
        # The texts are sent only when the settings differ, because the texts of all processes are
        # large.
        texts = _round(coordinator, "settings.texts", deadline_left_s(deadline_s) + _DIFFER_S)
        differences = texts.hold(msgspec.json.encode(own), texts.when_all(_differences))
        name = "settings.texts.told, process 0"
        raise ConfigError(decode_message(differences, list[str], name))
    if decision.error:
        raise ConfigError([decision.error])
    return decision.start, decision.outside


def _round(coordinator: Coordinator, name: str, timeout_s: float) -> Round:
    # This round cannot find processes that have left: they announce that under the run's name.
    return Round(coordinator, name, timeout_s, absent=nobody, prompt=True)


def _answer(settings_round: Round, said: Mapping[int, bytes]) -> Answer | None:
    """Answer an error at once, before the last process has come; else when all have come."""
    hellos = decode_each(said, _Hello, "settings", lambda text: _Hello("", text))
    errors = joined_errors({p: hello.problem for p, hello in hellos.items()})
    if errors:
        return msgspec.json.encode(_Decision(error=errors))
    differ = len({hello.digest for hello in hellos.values()}) > 1
    if differ:
        decision = _Decision(differ=True)
    else:
        outside = outside_hosts(hello.host for hello in hellos.values() if hello.host)
        decision = _Decision(start=secrets.token_hex(8), outside=outside)
    return settings_round.when_all(lambda _: msgspec.json.encode(decision))(said, {})


def _differences(said: Mapping[int, bytes]) -> bytes:
    tables: dict[int, dict[str, str]] = {}
    unreadable: list[str] = []
    for process, data in said.items():
        key = f"settings.texts/{process}"
        try:
            tables[process] = decode_message(data, dict[str, str], key)
        except CoordinationError as error:
            unreadable.append(str(error))
    return msgspec.json.encode([*unreadable, *differing_settings(tables)][:_MOST_LINES])


def differing_settings(tables: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each setting that differs: its name, each value, and its processes.

    ``tables``: by process, the text of each setting that must agree. "Not known" counts as a
    value.
    """
    names = sorted({name for table in tables.values() for name in table})
    lines: list[str] = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, table in sorted(tables.items()):
            holders.setdefault(table.get(name, "not known there"), []).append(process)
        if len(holders) > 1:
            values = "; ".join(
                f"{value} at {processes_text(who)}" for value, who in holders.items()
            )
            lines.append(f"{name} differs between the processes: {values}")
    return lines


def secret_text(run_id: str, own: OwnSecret | None) -> str:
    """Return a text that is equal on two processes exactly if they were given the same secret.

    The text has a digest of the stretched secret, so a guess costs as much as at a handshake.
    """
    if own is None:
        return "none"
    digest = hashlib.sha256(b"emergency_ckpt secret" + stretched(run_id, own.value)).hexdigest()
    return f"{own.kind}, {digest[:16]}"


def share_secret(coordinator: Coordinator, own: OwnSecret | None, timeout_s: float) -> bytes:
    """Return the run's secret: the given one (``own``), or one that process 0 makes up. Collective.

    All processes were given the same secret, or no process was given one. DeadlineExceeded when
    process 0 did not come; ConfigError when the value in the service is no secret.
    """
    if own is not None:
        return own.value
    if coordinator.process_index != 0:
        secret = wait_for_key(coordinator, _KEY, timeout_s, prompt=True)
        check_secret(secret)
        return secret
    secret = generate_secret()
    if coordinator.process_count > 1:
        coordinator.put(_KEY, secret)
    return secret


def forget_secret(coordinator: Coordinator) -> None:
    """Delete the secret from the service. For the leader, once all processes have read it."""
    if coordinator.process_index == 0:
        forget(coordinator, _KEY)
