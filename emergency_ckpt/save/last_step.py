"""At the end of a run that ends well, RAM's newest step is written from the slots to storage.

A run may end long after its last save to storage, and RAM is lost with its hosts. The step is
written as any other step (``save.persistent``), but its bytes come from the slots that have it
(``PublishedCapture``), and from the host states in RAM. No array of the user is read.

The leader alone knows what storage has, and sets a cell with its decision. A process that cannot
take part reports that in the rounds of the save, which then fails on all processes; this failure is
no error, since the user has not asked for the save.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from emergency_ckpt.background import chain, closing
from emergency_ckpt.cluster.coordination import decode_message
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.process_placement import ProcessPlacement, ram_writers
from emergency_ckpt.cluster.round import Cell
from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.core.placement.placement_policies import RamWriters
from emergency_ckpt.core.save.ending import step_for_storage
from emergency_ckpt.core.timeline import check_save, life_of
from emergency_ckpt.errors import CheckpointError, CoordinationError, HostStateError
from emergency_ckpt.save.persistent.capture import PublishedCapture
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.save.save_work import SavedSteps, SaverParts
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.state.host_state import HostStateDocument, decode_of
from emergency_ckpt.types import PERSISTENT, OrbaxStep, SaveId


class LastSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's decision: a save that RAM has, and how it is written to storage.

    Attributes:
      in_ram: the save in RAM; None: nothing is written.
      stored: the save's identity in storage: a new identity where an earlier attempt may have used
        that of ``in_ram``.
      orbax: what Orbax's readers find, as process 0 has it in RAM.
    """

    in_ram: SaveId | None = None
    stored: SaveId | None = None
    members: tuple[ProcessIndex, ...] = ()
    holders: tuple[ProcessIndex, ...] = ()
    orbax: OrbaxStep = OrbaxStep()


def decision_of(data: bytes, run_id: str, count: int) -> LastSave:
    """Return the leader's decision in a job of ``count`` processes.

    CoordinationError, CorruptData: ``data`` cannot be a decision.
    """
    name = "the last save, process 0"
    decision: LastSave = decode_message(data, LastSave, name)
    if decision.in_ram is None:
        return decision
    members, holders = decision.members, decision.holders
    if decision.stored is None or not holders or not set(holders) <= set(members):
        raise CoordinationError("read", name, "it does not name the save and its writers")
    if max(members) >= count or members[0] != 0 or len(set(members)) < len(members):
        raise CoordinationError("read", name, f"these are no writers of this job: {members}")
    for save in (decision.in_ram, decision.stored):
        check_save(save)
        if (save.step, save.run_id) != (decision.in_ram.step, run_id):
            raise CoordinationError("read", name, f"{save} is not a save of that step and run")
    return decision


class LastStep:
    """Brings the newest step of RAM to storage, once, at the end. For the training thread.

    Attributes:
      reason: why storage lacks the step, as far as this process knows; empty for no such reason.
    """

    def __init__(
        self,
        parts: SaverParts,
        persistent: PersistentSaves,
        schedule: TierSchedule,
        saved: SavedSteps,
    ) -> None:
        self._parts = parts
        self._persistent = persistent
        self._schedule = schedule
        self._saved = saved
        self._me, self._count = parts.process
        self.reason = ""

    def agree(
        self,
        placement: ProcessPlacement | None,
        deadline_s: float,
        inspect: Callable[[], None],
        *,
        goes_on: bool = False,
    ) -> LastSave | None:
        """Return the save that all write to storage now; None for none. Blocks for the leader.

        Args:
          placement: of the newest structure of the state; None where saves are still under way.
          inspect: called during the wait; may raise PeerLeft.
          goes_on: the loop has not ended, and may save again. Then a step of an earlier life, and a
            step that an earlier attempt may have sent to storage, are not written.
        """
        parts, in_ram = self._parts, self._parts.local.complete
        when = "overdue" if goes_on else "last"
        cell = Cell(parts.coordinator, f"{when}/{self._saved.incarnation}")

        def inspect_leader() -> str:
            inspect()
            newest, left_processes = parts.local.complete, LeftProcesses(parts.coordinator)
            assert newest is not None, "else nothing is waited for"
            return left_processes.absent(PERSISTENT, newest, {0}).get(0, "")

        try:
            if self._me == 0:
                decision = self._decide(placement, goes_on=goes_on)
                if self._count > 1:
                    cell.settle(msgspec.json.encode(decision))
            elif placement is None or in_ram is None:
                return None
            elif in_ram.step <= max(self._persistent.steps, default=-1):
                return None  # storage lacks nothing, as far as this process knows
            else:
                left_s = max(0.0, deadline_s - time.monotonic())
                data = cell.wait(left_s, inspect_leader)
                decision = decision_of(data, parts.config.run_name, self._count)
        except CheckpointError as error:
            self.reason = str(error)
            return None
        return decision if decision.in_ram is not None else None

    def begin(self, decision: LastSave, placement: ProcessPlacement) -> None:
        """Begin this process's part in the background; ``reason`` names a failure afterwards."""
        in_ram, stored = decision.in_ram, decision.stored
        assert in_ram is not None, "there is something to write"
        assert stored is not None, "and it has a name in storage"
        persistent, members = self._persistent, decision.members
        self._schedule.note_due(stored.step)
        try:
            document = self._own_document(in_ram)
        except CheckpointError as error:
            self.reason = reason = str(error)
            self._schedule.start(lambda: persistent.leave_out(stored, members, reason[:500]))
            return
        shards = placement.held if self._me in decision.holders else ()
        capture = PublishedCapture(self._parts.tier, in_ram, placement.leaves, shards)
        metrics = decision.orbax.metrics
        job = PersistentSave(
            save=stored,
            tree=placement.tree,
            load=capture.load,
            host_state=document.payload,
            topology=placement.topology,
            writers=members,
            metrics=metrics if isinstance(metrics, dict) else None,
            keeps=self._saved.restored,
            orbax=decision.orbax,
            holders=decision.holders,
            is_due=False,
        )

        def work() -> None:
            is_complete = persistent.run(job)
            self.reason = persistent.problem
            capture.close(is_written=is_complete)

        self._schedule.start(closing(capture, chain(work)))

    def _decide(self, placement: ProcessPlacement | None, *, goes_on: bool) -> LastSave:
        """Return the decision, at the leader; nothing where it fails."""
        if placement is None:
            self.reason = "saves in progress have not ended in time"
            return LastSave()
        complete, timelines = self._parts.local.complete, self._parts.timelines
        writers, rejection = RamWriters(), ""
        if complete is not None:
            rejection = timelines.rejection_reason(complete.step, complete.incarnation)
            writers = ram_writers(self._parts.config, placement)
        save, self.reason = step_for_storage(
            complete,
            self._persistent.newest_listed(),
            rejection,
            writers.members,
            is_paced=goes_on or self._schedule.plan.is_paced,
        )
        if save is None:
            return LastSave()
        is_new = self._schedule.is_behind(save.step)
        if goes_on and not (is_new and life_of(save.incarnation) == self._saved.incarnation):
            self.reason = f"step {save.step} is not one that this life saved to RAM alone"
            return LastSave()
        try:
            orbax = self._own_document(save).orbax
        except CheckpointError as error:
            self.reason = str(error)
            return LastSave()
        # An attempt that failed may have used the names of a step that is not new.
        stored = save if is_new else self._saved.identity(save.step, forced=True)
        return LastSave(save, stored, writers.members, writers.holders, orbax)

    def _own_document(self, save: SaveId) -> HostStateDocument:
        """Return this process's host state of ``save``, from RAM. HostStateError, CorruptData."""
        data = self._parts.tier.host_state_bytes(save, self._me, self._count)
        if data is None:
            problem = f"process {self._me} does not have its own in RAM"
            raise HostStateError("read", f"host state of step {save.step}", problem)
        return decode_of(save, self._me, self._count, data)
