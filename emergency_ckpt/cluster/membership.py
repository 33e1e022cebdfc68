"""The membership of one process in a job: its ramdisk, its server, and its peers."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from emergency_ckpt.background import copy_threads
from emergency_ckpt.cluster.coordination import connect, route_to
from emergency_ckpt.cluster.peers import Known, Peers, agree_start
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.cluster.start_agreement import MADE_UP, forget_secret, share_secret
from emergency_ckpt.config import Config
from emergency_ckpt.core.address import reachable_host
from emergency_ckpt.events import EventSink
from emergency_ckpt.files import resolved
from emergency_ckpt.ram.old_lives import greatest_number
from emergency_ckpt.ram.other_runs import GRACE_S, LeftRun, OtherRuns
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.run_secret import OwnSecret
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
      name: the name from ``agree_settings``.
      secret: the secret that was given to this process, and to all others; None: none was given.
      host: numeric address on which this process would serve its peers.
      outside: from ``agree_settings``: hosts whose processes cannot reach a loopback address.
    """

    name: str
    secret: OwnSecret | None
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
        self.coordinator = connect(run_id)
        self._secret = share_secret(self.coordinator, start.secret, config.start_timeout_s)
        if start.secret is None and count > 1 and me == 0:
            events.emit("warning", cause="setting", text=MADE_UP)
        self.client = TransferClient(
            run_id=run_id, secret=self._secret, io_timeout_s=config.transfer_timeout_s
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
        self.tier.note_incarnation(started.incarnation)
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
            secret=self._secret,
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
