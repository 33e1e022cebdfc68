"""The outcome of planning a restore. Values that travel as compact JSON.

As in ``types``, the garbage collector does not look at those of which there are many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.types import Contents, SaveId, ShardId

TargetSet = tuple[ShardId, ...]
"""The distinct shards that a process needs on its devices after the restore.

Processes that need the same shards should share one tuple object: it is then looked at once.
"""

Tier = Literal["local", "persistent"]

MAX_REASON_CHARS = 400
MAX_REJECTIONS = 32


class LocalRead(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Shards that the process reads from its own RAM.

    Attributes:
      digest: of the manifest that the process itself holds.
      shards: indices into that manifest's shards; None for all of them.
      alternates: other holders of the same manifest, to fetch a shard from when the own copy
        fails verification.
    """

    digest: str
    shards: tuple[int, ...] | None = None
    alternates: tuple[str, ...] = ()


class FetchGroup(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Shards that the process fetches.

    Attributes:
      digest: of a manifest that every source holds.
      shards: indices into that manifest's shards; None for all of them.
      sources: holders that have every one of these shards intact; the first is to be used, the
        others are alternates in the order to try them.
    """

    digest: str
    shards: tuple[int, ...] | None
    sources: tuple[str, ...]


class HostStateFetch(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One host state to bring back.

    Attributes:
      owner: the process index, at the time of the save, that it belongs to.
      digest: of the copy to use. Other copies of the same owner may differ: never take those.
      sources: holders, in the order to try them. A process that is itself among them reads its
        own copy first.
    """

    owner: int
    digest: str
    sources: tuple[str, ...]


class ProcessPlan(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """What one process does.

    The shards of ``local`` and ``fetch`` together hold every element of the process's targets: a
    target that has a shard of its own box is that shard, any other is put together from shards
    that overlap it (and perhaps each other: each element is taken from one, see
    ``boxes.divide``). A target without elements needs no shard.

    Attributes:
      host_states: the process's own one; those of all former processes when a remap is due;
        none when none is needed or all are empty. For the persistent tier always none.
      addresses: ``"host:port"`` of each holder named above but the process itself.
      outvoted: by digest of an own manifest, the shards of which a majority of the holders has
        other bytes. The process must never use these copies again.
    """

    local: tuple[LocalRead, ...] = ()
    fetch: tuple[FetchGroup, ...] = ()
    host_states: tuple[HostStateFetch, ...] = ()
    addresses: dict[str, str] = {}
    outvoted: dict[str, tuple[int, ...]] = {}


class Rejection(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A save that was newer than the chosen one, and what it lacked, in words."""

    step: int
    tier: Tier
    reason: str
    incarnation: str | None = None


class RestorePlan(msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True):
    """A whole step, and how each process gets its part of it.

    Attributes:
      save: identity of the save; None for the persistent tier.
      rejected: newer saves, newest first.
      host_state_count: number of processes that the save's host states are of; None when host
        states were not asked for or the save has none.
      notes: contradictions in the inventories that a person should know of.
      timeline: the newest that is known; every process learns it.
    """

    tier: Tier
    step: int
    save: SaveId | None
    processes: dict[int, ProcessPlan]
    rejected: tuple[Rejection, ...] = ()
    host_state_count: int | None = None
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None

    def share_of(self, process: int) -> RestorePlan:
        """This plan with the part of one process only: what is sent to that process."""
        part = self.processes.get(process, ProcessPlan())
        return msgspec.structs.replace(self, processes={process: part})


class NoPlan(msgspec.Struct, frozen=True, tag="no_plan", forbid_unknown_fields=True):
    """Why there is nothing to restore, or why it must not be restored.

    Attributes:
      kind: ``nothing``: a fresh start, nobody ever had a whole step.
        ``unrecoverable``: whole steps existed, none is left.
        ``step_not_found``: the requested step is not whole in any tier.
        ``state_mismatch``: the newest whole save has other leaves than expected; ``mismatches``.
        ``host_state_count``: the newest whole save has the host states of ``saved_count``
        processes, the job has ``process_count``, and there is no remap.
        ``no_host_state``: the newest whole step was written by plain Orbax, without host states.
        ``diverged``: replicas of the newest whole save differ, without a majority; ``missing``.
      step: the step in question, where there is one.
      missing: one line for each thing that is lost or in the way.
    """

    kind: Literal[
        "nothing",
        "unrecoverable",
        "step_not_found",
        "state_mismatch",
        "host_state_count",
        "no_host_state",
        "diverged",
    ]
    step: int | None = None
    rejected: tuple[Rejection, ...] = ()
    missing: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    saved_count: int | None = None
    process_count: int | None = None
    notes: tuple[str, ...] = ()


def selected(shards: tuple[int, ...] | None, contents: Contents) -> Iterable[int]:
    """The shard indices that ``LocalRead.shards`` or ``FetchGroup.shards`` stands for."""
    return range(len(contents.shards)) if shards is None else shards


def clip(text: str, limit_chars: int = MAX_REASON_CHARS) -> str:
    """``text``, cut to the limit: reasons travel and are logged."""
    return text if len(text) <= limit_chars else f"{text[: limit_chars - 3]}..."


def few(items: Iterable[object], at_most: int = 4) -> str:
    """The first items, and how many more there are."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - at_most} more" if len(texts) > at_most else ""
    return ", ".join(texts[:at_most]) + more
