"""Reports of the holders before a restore. Value types only.

As in ``types``, values that occur in large numbers are exempt from garbage collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from emergency_ckpt.core.step_log import Table
from emergency_ckpt.core.timeline import Timeline, newest, newest_step, number_of
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.types import PERSISTENT, Contents, SaveId

MANY_LIVES = 3
"""So many lives in a row make a save suspect."""


class HeldTensors(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, gc=False):
    """A published manifest: its save, and the digest of its contents."""

    save: SaveId
    digest: str


class HeldHostState(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, gc=False):
    """A published host state of process ``owner`` of ``count``; its own or a buddy's copy.

    ``empty``: the process had no non-tensor state at that save (its payload is null).
    """

    save: SaveId
    owner: int
    count: int
    digest: str
    size_bytes: int
    empty: bool


class HolderInventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Everything that one holder has: a process of the job, or a server on a host's RAM.

    Attributes:
      holder: unique name; ``"process/3"`` for processes, ``"server/<address>"`` for servers.
      process_index: of a process of this job; None for a server.
      address: ``"host:port"`` where the holder serves its shards.
      known_complete: the newest save that this holder once knew to be globally complete. It only
        distinguishes a job that lost its checkpoints from one that never had any.
      known_stored: the newest save that this holder once knew to be complete in storage.
      timeline: the record of rolled-back saves that this holder has.
      incarnation: the newest incarnation of the job that it has heard of.
      sets: by digest of a manifest, the sets of shards in it (``shard_layout.shard_sets``). A
        manifest that is not among these must be read.
    """

    holder: str
    process_index: int | None
    address: str
    tensors: tuple[HeldTensors, ...]
    host_states: tuple[HeldHostState, ...]
    known_complete: SaveId | None = None
    known_stored: SaveId | None = None
    timeline: Timeline | None = None
    incarnation: str = ""
    sets: dict[str, dict[str, str]] = {}

    @property
    def greatest(self) -> int:
        """Return the greatest number of an incarnation that this holder knows; 0 without any."""
        incarnations = {entry.save.incarnation for entry in (*self.tensors, *self.host_states)}
        incarnations.update([self.incarnation, *([self.timeline.head] if self.timeline else [])])
        return max(map(number_of, incarnations))

    @property
    def newest_step(self) -> int:
        """Return the newest step that may be complete and was not rolled back; -1 without any."""
        saves = [self.known_complete] if self.known_complete else []
        return newest_step([*saves, *(manifest.save for manifest in self.tensors)], self.timeline)


class PersistentStep(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A step of the persistent tier that carries both of its markers, or plain Orbax's.

    Attributes:
      process_count: number of host states.
      has_host_state: False when all are empty.
      incarnation: of the save; of a step of plain Orbax see ``plain_incarnation``.
      problem: why it must not be restored although it exists; empty when it may.
      tensors_of: of a step without host states: the incarnation of the save of this package that
        wrote its tensors; empty when plain Orbax wrote them.
      is_seen: False: a folder that no log names; all but its step is unknown until inspected.
      is_foreign: another program wrote it beside a log that does not name it. It has a ``problem``.
    """

    step: int
    process_count: int
    has_host_state: bool
    incarnation: str = ""
    problem: str = ""
    tensors_of: str = ""
    is_seen: bool = True
    is_foreign: bool = False


class Quarantined(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A copy that failed verification: shard ``shard`` of manifest ``digest`` at ``holder``.

    ``shard`` None means all of the holder's manifest (for instance, it is not held any more). See
    ``persistent_unusable`` for a step in storage.
    """

    holder: str
    digest: str
    shard: int | None = None

    def __str__(self) -> str:
        part = "all" if self.shard is None else f"shard {self.shard}"
        return f"{part} of {self.digest[:12]} at {self.holder}"


def persistent_unusable(step: int) -> Quarantined:
    """Return what takes a step of storage out of a plan."""
    return Quarantined(PERSISTENT, f"{PERSISTENT}/{step}")


def persistent_unreadable(step: int) -> Quarantined:
    """Return what says of an unusable step of storage that its files could not be read.

    The step was whole as far as its marker shows, and storage answered.
    """
    return Quarantined(PERSISTENT, f"unreadable/{step}")


class Inventory(msgspec.Struct, frozen=True):
    """The leader's input: every holder, the manifests by digest, and the persistent steps.

    Attributes:
      manifests: those that were read.
      timeline: the newest known to any holder; None before the first completed restore.
      needs: by process, the sorted names of the sets of shards that the process needs; without the
        processes that have not reported it.
    """

    holders: tuple[HolderInventory, ...]
    manifests: Mapping[str, Contents]
    persistent: tuple[PersistentStep, ...] = ()
    quarantined: frozenset[Quarantined] = frozenset()
    timeline: Timeline | None = None
    needs: Mapping[int, tuple[str, ...]] = {}


def newest_timeline(
    holders: Sequence[HolderInventory], timeline: Timeline | None = None, table: Table | None = None
) -> Timeline | None:
    """Return the newest timeline of the holders, of ``table`` of storage's log, and ``timeline``.

    Of several lives with one number, the life with the newest save counts: a save that a holder
    knows to be complete, or that the log lists.
    """
    timelines = [holder.timeline for holder in holders]
    complete = [holder.known_complete for holder in holders if holder.known_complete]
    if table is not None:
        timelines.append(table.chain)
        complete += [SaveId(e.step, e.incarnation, table.run_id) for e in table.counting()]
    return newest(*timelines, timeline, complete=complete)


class RestoredSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """``lives`` in a row began from ``save``, and none of them completed a newer one.

    The chain does not tell: a restore of the newest step is in it only from its first complete save
    on. So each restore is counted, in RAM's ledgers and, where the step came from storage, in its
    log.
    """

    save: SaveId
    lives: int


def lives_from(save: SaveId, records: Iterable[RestoredSave]) -> int:
    """Return how many lives in a row began from ``save``, by the record of the most lives."""
    return max((record.lives for record in records if record.save == save), default=0)


def suspicion(suspect: RestoredSave, reached: int) -> str:
    """Return what is told of a suspect save; ``reached``: the newest step that has a part."""
    step = suspect.save.step
    began = count_text(suspect.lives, "life in a row", "lives in a row")
    came = f", the last came to step {reached} or further" if reached > step else ""
    return (
        f"{began} ended before a newer save than step {step} was complete{came}; it is restored"
        " again: restore(step=...) goes back further"
    )
