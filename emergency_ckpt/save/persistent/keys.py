"""Keys by which the processes talk during persistent saves, and their deletion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from emergency_ckpt.cluster.coordination import Coordinator, forget
from emergency_ckpt.cluster.departures import Departures
from emergency_ckpt.cluster.messages import by_process, reason_of
from emergency_ckpt.cluster.round import wait_for_key
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.save.persistent.reports import StageReport, report_of
from emergency_ckpt.types import SaveId

_KEPT_REFUSALS = 2
FIRST_STAGE = "host_states"
REFUSED = "refused"
OUTCOME = "outcome"


class PersistentSaveKeys:
    """Keys ``persist/<incarnation>/<step>/<stage>/<process>``. Belongs to the background thread.

    The first writer forgets the keys of a save when all writers are at a later one.
    """

    def __init__(self, coordinator: Coordinator, departures: Departures | None = None) -> None:
        self._coordinator = coordinator
        self._departures = departures or Departures(coordinator)
        self._saves: deque[SaveId] = deque()
        self._refusals: deque[str] = deque()

    def put(self, save: SaveId, stage: str, value: bytes) -> None:
        """Tell ``value`` about this process's ``stage`` of ``save``."""
        key = f"{_prefix(save)}/{stage}/{self._coordinator.process_index}"
        if stage == FIRST_STAGE:
            self._saves.append(save)
        elif stage == REFUSED:
            # One that comes after the first writer has forgotten the save would stay for ever.
            self._refusals.append(key)
            while len(self._refusals) > _KEPT_REFUSALS:
                forget(self._coordinator, self._refusals.popleft())
        self._coordinator.put(key, value)

    def begin(self, save: SaveId) -> None:
        """Tell that this process has come to ``save``: it takes part in none before it."""
        self._departures.come_to("persistent", save)

    def get(
        self,
        save: SaveId,
        stage: str,
        process: int,
        timeout_s: float,
        look: Callable[[], str] = lambda: "",
    ) -> bytes:
        """Wait for what ``process`` says of ``stage``.

        PeerLeft when it takes no part in ``save`` (any more), or ``look`` gives another reason.
        DeadlineExceeded.
        """
        key = f"{_prefix(save)}/{stage}/{process}"

        def why_not() -> str:
            return look() or "; ".join(self.absent(save, [process]).values())

        return wait_for_key(self._coordinator, key, timeout_s, why_not)

    def report(self, save: SaveId, stage: str, writer: int, timeout_s: float) -> StageReport:
        """Wait for the report of ``writer`` on ``stage``. As ``get``; CoordinationError."""
        return report_of(self.get(save, stage, writer, timeout_s), stage, save.step, writer)

    def absent(self, save: SaveId, processes: Collection[int]) -> dict[int, str]:
        """Return which of ``processes`` take no part in ``save``, each with a sentence."""
        return self._departures.absent("persistent", save, processes)

    def list(self, save: SaveId, stage: str) -> dict[int, bytes]:
        """Return the reports of ``stage`` that are there so far, by process."""
        name = f"{_prefix(save)}/{stage}"
        return by_process(self._coordinator.list(name), name, self._coordinator.process_count)

    def check_sent(self, save: SaveId, owners: Collection[int]) -> None:
        """PersistentTierError when one of ``owners`` will not send its host state."""
        refused = self.list(save, REFUSED)
        for owner in sorted(refused.keys() & set(owners)):
            problem = f"process {owner} cannot send its own: {reason_of(refused[owner])}"
            raise PersistentTierError("collect", f"host states of step {save.step}", problem)
        for reason in self.absent(save, owners).values():
            raise PersistentTierError("collect", f"host states of step {save.step}", reason)

    def forget_old(self, members: Collection[int]) -> None:
        """Forget saves that all writers have left behind; the first writer calls this.

        A writer that has begun a save is done with those before it, whatever became of them.
        """
        saves = list(self._saves)
        for index in range(len(saves) - 1, 0, -1):
            if set(members) <= self.list(saves[index], FIRST_STAGE).keys():
                for _ in range(index):
                    forget(self._coordinator, _prefix(self._saves.popleft()))
                return


def _prefix(save: SaveId) -> str:
    return f"persist/{save.incarnation}/{save.step}"
