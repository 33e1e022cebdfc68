"""The parts, the request and the result of a restore on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.round import Series
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.cluster.stored_chain import StoredChain
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.config import Config
from emergency_ckpt.core.placement.retained_shards import RetainedShards
from emergency_ckpt.core.restore.plan_types import Rejection
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.protocol import Tally
from emergency_ckpt.state.host_state import HostStateDocument
from emergency_ckpt.state.tree import PyTree, StateTree
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import LeafSpec, SaveId, ShardId, TierName


@dataclasses.dataclass(frozen=True)
class RestoreParts:
    """Parts that every restore of one checkpointer works with.

    Attributes:
      stored_chain: None in a job that does not save to storage.
      series: the rounds of all its restores.
    """

    config: Config
    coordinator: Coordinator
    tier: LocalTier
    holdings: ProcessHoldings
    client: TransferClient
    peers: Peers
    persistent: PersistentTier | None
    events: EventSink
    timelines: Timelines
    stored_chain: StoredChain | None
    series: Series = dataclasses.field(default_factory=Series)

    @property
    def process(self) -> tuple[int, int]:
        """(index of this process, number of processes)."""
        return self.coordinator.process_index, self.coordinator.process_count


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The state that one restore, prefetch or survey is asked for, on this process.

    Attributes:
      like: gives the types of host values.
      requested_step: None: the newest that is whole.
      retained: the shards that stay in this process's RAM; None: all that it needs.
      tensors_only: nothing is said of a host state that nobody wants.
    """

    tree: StateTree
    like: PyTree
    requested_step: int | None
    wants_host_state: bool
    retained: RetainedShards | None
    tensors_only: bool = False

    def host_types(self) -> list[tuple[type[Any], object]]:
        """Return type and dtype of each host value: the dtype also tells the byte order."""
        flat = jax.tree_util.tree_leaves(self.like)
        values = (flat[leaf.position] for leaf in self.tree.leaves if leaf.sharding is None)
        return [(type(value), getattr(value, "dtype", None)) for value in values]


@dataclasses.dataclass(frozen=True)
class MadeOf:
    """Ingredients of a state on this process's devices: the same ones make the same state.

    It says nothing of the holders from whom the bytes came.

    Attributes:
      host_types: as in ``RestoreRequest``.
      leaves: by path, as saved.
      crcs: CRC32C of each chosen shard.
    """

    save: SaveId
    tree: StateTree
    host_types: list[tuple[type[Any], object]]
    leaves: Mapping[str, LeafSpec]
    crcs: Mapping[ShardId, int]

    def difference(self, wanted: MadeOf) -> str:
        """Return in what this is not ``wanted``; empty when it is."""
        if (self.tree, self.host_types) != (wanted.tree, wanted.host_types):
            return "another state was prefetched"
        if self.save.step != wanted.save.step:
            return f"step {self.save.step} was prefetched, and {wanted.save.step} is restored"
        if self != wanted:
            return f"other copies of step {self.save.step} were prefetched"
        return ""


@dataclasses.dataclass(frozen=True)
class RestoredState:
    """The restored step, as this process has it.

    Attributes:
      save: its identity; it lies in RAM now, wherever it came from.
      tier: where this process's part came from.
      is_loaded: this restore loaded the step from storage, on all processes.
      is_prefetched: ``state`` was on the devices before.
      made_of: of which it was made, in a prefetch.
      documents: the host states that belong to this process.
      gathered: digest of the slot with all that this process keeps, where one was written.
      timeline: the newest that any process knew, or storage.
      incarnation: the id under which the job saves from now on; empty until all processes have
        their part.
      lack: why a part of the step is not in this process's RAM; empty when all of it is.
    """

    step: int
    save: SaveId
    tier: TierName
    state: PyTree
    documents: list[HostStateDocument]
    tally: Tally
    rejected: tuple[Rejection, ...]
    gathered: str | None = None
    timeline: Timeline | None = None
    incarnation: str = ""
    lack: str = ""
    is_loaded: bool = False
    is_prefetched: bool = False
    made_of: MadeOf | None = None
