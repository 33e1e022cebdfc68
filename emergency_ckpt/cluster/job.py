"""One process's place in the job, which is passed whole to all that saves and restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import Series
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.cluster.timelines import StoredChain, Timelines
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.events import EventSink
from emergency_ckpt.observer import StepProgress
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.state.link import Link
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.transfer.client import TransferClient


@dataclasses.dataclass(frozen=True)
class Job:
    """One process's place in the job, and what its saves and restores share.

    Attributes:
      process: (index of this process, number of processes).
      tier: this process's RAM.
      persistent: the directory in storage; None without one.
      stored_chain: None in a job that does not save to storage.
      watch: the notices of a preemption.
      progress: what the training thread waits for, and how long the wait may last.
      inspect: raises PeerLeft when a process has died, for which the training waits in vain.
      link: between devices and host memory.
      restores: the rounds of all restores, and of what the faces agree on before them.
    """

    config: Config
    process: tuple[int, int]
    coordinator: Coordinator
    tier: LocalTier
    holdings: ProcessHoldings
    client: TransferClient
    peers: Peers
    persistent: PersistentTier | None
    timelines: Timelines
    stored_chain: StoredChain | None
    watch: PreemptionWatch
    events: EventSink
    failures: Failures
    progress: StepProgress
    inspect: Callable[[], None]
    link: Link
    buffers: Buffers
    restores: Series = dataclasses.field(default_factory=Series)
