"""The manifests that inventories name: read for the plan, each once over the whole job."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from emergency_ckpt.cluster.peers import fetch_contents
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.errors import CheckpointError, HolderUnreachable
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Contents, SaveId

_AT_ONCE = 16
_ATTEMPTS = 3


class ManifestReads:
    """Contents by digest. A digest names its contents, so what was read once stays.

    Attributes:
      unread: the digests that no holder could be asked for, and the saves they are of.
    """

    def __init__(
        self, tier: LocalTier, client: TransferClient, calls: HolderCalls, events: EventSink
    ) -> None:
        self._tier = tier
        self._client = client
        self._calls = calls
        self._events = events
        self._found: dict[str, Contents] = {}
        self._holders: dict[str, dict[str, str]] = {}
        self.unread: dict[str, SaveId] = {}

    def read(self, holders: Sequence[HolderInventory]) -> dict[str, Contents]:
        """Contents of what these hold. Each holder is asked a few times; see ``unread``."""
        self._holders, saves = {}, dict[str, SaveId]()
        for holder in holders:
            for held in holder.tensors:
                self._holders.setdefault(held.digest, {})[holder.holder] = holder.address
                saves[held.digest] = held.save
        self._found = {d: c for d, c in self._found.items() if d in self._holders}
        missing = [digest for digest in self._holders if digest not in self._found]
        unreachable = self._read_all(missing, attempts=_ATTEMPTS)
        self.unread = {digest: saves[digest] for digest in unreachable}
        return dict(self._found)

    def read_again(self, digests: Collection[str]) -> dict[str, Contents]:
        """As ``read``, of some that are ``unread``, again and again until the deadline.

        HolderUnreachable when the holders of one still cannot be reached then.
        """
        unreachable = self._read_all(digests, attempts=None)
        self.unread = {d: save for d, save in self.unread.items() if d not in digests}
        if unreachable:
            raise next(iter(unreachable.values()))
        return dict(self._found)

    def _read_all(
        self, digests: Collection[str], *, attempts: int | None
    ) -> dict[str, HolderUnreachable]:
        if not digests:
            return {}
        # Each from another peer: one after the other, a large job would wait for every one.
        with ThreadPoolExecutor(_AT_ONCE, "eckpt-manifests") as pool:
            answers = pool.map(partial(self._read_one, attempts=attempts), digests)
            unreachable: dict[str, HolderUnreachable] = {}
            for digest, answer in zip(digests, answers, strict=True):
                if isinstance(answer, HolderUnreachable):
                    unreachable[digest] = answer
                elif answer is not None:
                    self._found[digest] = answer
        return unreachable

    def _read_one(
        self, digest: str, *, attempts: int | None
    ) -> Contents | HolderUnreachable | None:
        """None, with events, when the holders have answered and none gives it."""
        own = self._tier.contents(digest)
        if own is not None:
            return own
        holders = self._holders[digest]

        def note(holder: str, error: CheckpointError) -> None:
            # Absent for the planner, which says so; another holder may still give it.
            reason, address = str(error), holders[holder]
            self._events.emit(
                "restore.holder_unreachable", holder=holder, address=address, reason=reason
            )

        try:
            return self._calls.first(
                f"manifest {digest[:12]}",
                tuple(holders),
                lambda holder: fetch_contents(self._client, holders[holder], digest),
                note,
                attempts=attempts,
            )
        except HolderUnreachable as error:
            return error


def passed_over_unread(
    answer: RestorePlan | NoPlan,
    unread: Iterable[tuple[str, SaveId]],
    requested_step: int | None,
    *,
    stored: Mapping[int, str],
    loaded_steps: Container[int],
) -> list[str]:
    """Digests of unread manifests of saves that would go before ``answer``, were they whole.

    Pure. Without them nobody can say that ``answer`` is the newest whole step. A persistent step
    is as good as the same in RAM, unless it lies in RAM because this restore has loaded it.
    """
    found: list[str] = []
    for digest, save in unread:
        if requested_step not in (None, save.step):
            continue
        if isinstance(answer, RestorePlan):
            is_newer = save.step > answer.step
            if save.step == answer.step and answer.save is None:
                is_newer = save.step in loaded_steps or save.incarnation > stored[save.step]
            elif save.step == answer.step and answer.save is not None:
                is_newer = save.incarnation > answer.save.incarnation
        else:
            ends = ("state_mismatch", "host_state_count", "no_host_state", "diverged")
            blocked = answer.kind in ends
            is_newer = not blocked or answer.step is None or save.step > answer.step
        if is_newer:
            found.append(digest)
    return found
