"""The keys by which the processes talk during persistent saves, and their deletion."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from emergency_ckpt.cluster.coordination import Coordinator, forget
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.messages import reason_of
from emergency_ckpt.cluster.round import Answer, Cell, Round, Rule
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.save.persistent.reports import StageReport, report_of
from emergency_ckpt.types import PERSISTENT, SaveId

_KEPT_REFUSALS = 2
FIRST_STAGE = "host_states"
DOCUMENTS = "documents"
TENSORS = "tensors"


class PersistentSaveKeys:
    """Keys ``persist/<incarnation>/<step>/<stage>/<process>``. Belongs to the background thread.

    The first writer forgets the keys of a save when all writers are at a later one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timeout_s: float,
        left_processes: LeftProcesses | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._left_processes = left_processes or LeftProcesses(coordinator)
        self._saves: deque[SaveId] = deque()
        self._refusals: deque[str] = deque()

    def begin(self, save: SaveId) -> None:
        """Tell that this process has come to ``save``: it takes part in none before it."""
        self._left_processes.come_to(PERSISTENT, save)

    def stage(self, save: SaveId, stage: str, writers: Sequence[int]) -> Round:
        """Begin a round of the ``writers``, which the first of them leads."""
        leads = self._coordinator.process_index == writers[0]
        if leads and stage == FIRST_STAGE:
            self._saves.append(save)
        return Round(
            self._coordinator,
            f"{_prefix(save)}/{stage}",
            self._timeout_s,
            members=writers,
            leader=writers[0],
            absent=lambda processes: self.absent(save, processes),
        )

    def outcome(self, save: SaveId) -> Cell:
        """Return the cell that says how ``save`` ended; see ``outcomes``."""
        return Cell(self._coordinator, f"{_prefix(save)}/outcome")

    def absent(self, save: SaveId, processes: Collection[int]) -> dict[int, str]:
        """Return which of ``processes`` take no part in ``save``, each with a sentence."""
        return self._left_processes.absent(PERSISTENT, save, processes)

    def refuse(self, save: SaveId, reason: str) -> None:
        """Tell the writer of this process's host state that it will not come."""
        # One that comes after the first writer has forgotten the save would stay for ever.
        self._refusals.append(f"{_prefix(save)}/refused/{self._coordinator.process_index}")
        while len(self._refusals) > _KEPT_REFUSALS:
            forget(self._coordinator, self._refusals.popleft())
        self._refusal(save).say(reason.encode())

    def check_sent(self, save: SaveId, owners: Collection[int]) -> None:
        """PersistentTierError when one of ``owners`` will not send its host state."""
        refused = self._refusal(save).said()
        for owner in sorted(refused.keys() & set(owners)):
            problem = f"process {owner} cannot send its own: {reason_of(refused[owner])}"
            raise PersistentTierError("collect", f"host states of step {save.step}", problem)
        for reason in self.absent(save, owners).values():
            raise PersistentTierError("collect", f"host states of step {save.step}", reason)

    def _refusal(self, save: SaveId) -> Round:
        return Round(self._coordinator, f"{_prefix(save)}/refused", self._timeout_s)

    def forget_old(self, writers: Collection[int]) -> None:
        """Forget saves that all writers have left behind; the first writer calls this.

        A writer that has begun a save is done with those before it, whatever became of them.
        """
        saves = list(self._saves)
        for index in range(len(saves) - 1, 0, -1):
            first = Round(
                self._coordinator, f"{_prefix(saves[index])}/{FIRST_STAGE}", self._timeout_s
            )
            if set(writers) <= first.said().keys():
                for _ in range(index):
                    forget(self._coordinator, _prefix(self._saves.popleft()))
                return


def rule_of(held: Round, stage: str, step: int, first_writer: int) -> Rule:
    """Return the rule of a stage: the first failure at once, or that it went well for all.

    It raises PeerLeft when a writer takes no part (any more), CoordinationError for no report.
    """

    def all_well(said: Mapping[int, bytes]) -> bytes:
        first = report_of(said[first_writer], stage, step, first_writer)
        return msgspec.json.encode(StageReport(kept=first.kept, attempt=first.attempt))

    def rule(said: Mapping[int, bytes], absent: Mapping[int, str]) -> Answer | None:
        for process, data in sorted(said.items()):
            report = report_of(data, stage, step, process)
            if report.error:
                return msgspec.json.encode(report.named(process))
        return held.when_all(all_well)(said, absent)

    return rule


def _prefix(save: SaveId) -> str:
    return f"persist/{save.incarnation}/{save.step}"
