"""The result of planning a restore. Values that travel as compact JSON.

As in ``types``, values that occur in large numbers are exempt from garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal

import msgspec

from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.types import SaveId, ShardId, TierName

TargetSet = tuple[ShardId, ...]
"""The distinct shards that a process needs on its devices after the restore.

Processes that need the same shards should share one tuple object, which is then processed once.
"""


class Targets(Mapping[int, TargetSet]):
    """The target set of each process, by its index, from a function that is called at most once.

    Few restores need these of all processes, and those of thousands take a second to make.
    """

    def __init__(self, process_count: int, make: Callable[[], Mapping[int, TargetSet]]) -> None:
        self._count = process_count
        self._make = make

    @cached_property
    def _made(self) -> Mapping[int, TargetSet]:
        return self._make()

    def __getitem__(self, process: int) -> TargetSet:
        return self._made[process]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count


MAX_REASON_CHARS = 400
MAX_REJECTIONS = 32


class ManifestHolders(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A manifest, and holders that have all shards of a bundle of it intact."""

    digest: str
    holders: tuple[str, ...]


def digests_by_holder(sources: Iterable[ManifestHolders]) -> dict[str, str]:
    """Return each holder's manifest, in the order of ``sources``: the first, if it has several."""
    digests: dict[str, str] = {}
    for source in sources:
        for holder in source.holders:
            digests.setdefault(holder, source.digest)
    return digests


class Bundle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Shards of which the same manifests have a copy.

    Attributes:
      targets: their places in the target set of the process; None for the whole target set.
      others: shards that are no targets. Targets without a copy of their own box are put together
        from these.
      sources: each of these has all of the shards.
    """

    targets: tuple[int, ...] | None
    others: tuple[ShardId, ...]
    sources: tuple[ManifestHolders, ...]


class OwnManifest(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A manifest that a process has itself, and the shards of it that the process must not use.

    A shard is unusable that is damaged, or whose content is not the one that all processes take.
    """

    digest: str
    unusable: tuple[int, ...]


class FetchGroup(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Shards of one manifest that a process fetches, or, without ``sources``, has itself.

    Attributes:
      shards: indices into the manifest's shards.
      sources: holders that have all of these shards; the first is asked first.
      others: other manifests with some of these shards, for when no source answers.
    """

    digest: str
    shards: tuple[int, ...]
    sources: tuple[str, ...]
    others: tuple[ManifestHolders, ...] = ()

    @property
    def digest_at(self) -> dict[str, str]:
        """Return the manifest to ask each holder for, in the order in which to ask them."""
        return digests_by_holder((ManifestHolders(self.digest, self.sources), *self.others))


class HostStateFetch(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One host state to restore.

    Attributes:
      owner: process index of its owner at the time of the save.
      digest: of the copy to use. Copies of the same owner with another digest must not be used.
      sources: holders in the order of attempts. A process among them reads its own copy first.
    """

    owner: int
    digest: str
    sources: tuple[str, ...]


class Copies(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The copies of one process's part of a save. What to take from which is up to the process.

    The shards of ``bundles`` together hold every element of the process's targets: a target that
    has a shard of its own box is that shard; any other is assembled from shards that overlap it and
    may overlap each other (``boxes.divide``). A target without elements needs none.

    Attributes:
      bundles: for processes with equal targets the same.
      own: the manifests that the process has itself.
      place: where the process begins in each list of sources and holders.
      host_states: the process's own one, which it keeps also where none is wanted or all are
        empty. None of another number of processes (``RestorePlan.every_host_state``), and none for
        the persistent tier.
    """

    bundles: tuple[Bundle, ...] = ()
    own: tuple[OwnManifest, ...] = ()
    place: int = 0
    host_states: tuple[HostStateFetch, ...] = ()

    @property
    def holders(self) -> set[str]:
        """Return the names of all holders of the copies."""
        manifests = [source.holders for bundle in self.bundles for source in bundle.sources]
        return set().union(*manifests, *(state.sources for state in self.host_states))


class Rejection(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A save that was newer than the chosen one, and the reason it was passed over.

    ``is_left``: the job has left it on purpose, or by another life; nothing of it is lost.
    ``is_unreadable``: it is in storage, with its marker, and its other files could not be read.
    """

    step: int
    tier: TierName
    reason: str
    incarnation: str | None = None
    is_left: bool = False
    is_unreadable: bool = False


class CommonPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a plan that is the same for all processes, and large: sent once.

    Attributes:
      host_states: ``RestorePlan.every_host_state``.
      addresses: of their holders, by name.
    """

    host_states: tuple[HostStateFetch, ...]
    addresses: dict[str, str]


class RestorePlan(msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True):
    """A complete step, which all processes restore, and the copies of each process's part of it.

    Attributes:
      save: identity of a save in RAM; None for a step in storage, which is first loaded into RAM.
      addresses: ``"host:port"`` of each holder, by name.
      rejected: newer saves, newest first.
      host_state_count: number of processes at the save, by its host states; None when no host
        state is to be applied, because none was asked for or the save has none.
      timeline: the newest one known; every process stores it.
      lives: so many in a row began from this save before.
      is_loaded: this restore has loaded the step from storage, on all processes.
      every_host_state: those of all former processes, which each process needs where a remap is
        due; else empty.
      has_common: this is a share, and its ``CommonPart`` is apart.
    """

    step: int
    save: SaveId | None
    copies: dict[ProcessIndex, Copies]
    addresses: dict[str, str] = {}
    rejected: tuple[Rejection, ...] = ()
    host_state_count: int | None = None
    timeline: Timeline | None = None
    lives: int = 0
    is_loaded: bool = False
    every_host_state: tuple[HostStateFetch, ...] = ()
    has_common: bool = False

    def share_of(self, processes: Iterable[int]) -> RestorePlan:
        """Return this plan with the parts of some processes only, as it is sent to these.

        What ``common`` returns is left out.
        """
        copies = {process: self.copies.get(process, Copies()) for process in processes}
        names = set[str]().union(*(part.holders for part in copies.values()))
        return msgspec.structs.replace(
            self,
            copies=copies,
            addresses=self._addresses_of(names),
            every_host_state=(),
            has_common=bool(self.every_host_state),
        )

    def common(self) -> CommonPart | None:
        """Return the part that all processes need alike; None where there is none."""
        if not self.every_host_state:
            return None
        names = set[str]().union(*(state.sources for state in self.every_host_state))
        return CommonPart(self.every_host_state, self._addresses_of(names))

    def with_common(self, common: CommonPart) -> RestorePlan:
        """Return this share with the part that all processes need alike."""
        return msgspec.structs.replace(
            self,
            addresses={**self.addresses, **common.addresses},
            every_host_state=common.host_states,
            has_common=False,
        )

    def _addresses_of(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.addresses[name] for name in sorted(names)}


class NoPlan(msgspec.Struct, frozen=True, tag="no_plan", forbid_unknown_fields=True):
    """The reason why there is nothing to restore, or why it must not be restored.

    Attributes:
      kind: ``nothing``: a fresh start; no process ever had a complete step.
        ``unrecoverable``: complete steps existed, none is left.
        ``step_not_found``: the requested step is not complete in any tier.
        ``state_mismatch``: the newest complete save has other leaves than expected; ``mismatches``.
        ``host_state_count``: the newest complete save has the host states of ``saved_count``
        processes, the job has ``process_count``, and there is no remap.
        ``no_host_state``: plain Orbax wrote the newest complete step, without host states.
        ``foreign``: the newest step is one of another program, which the step log does not name;
        ``missing`` says so.
      step: the step in question, where there is one.
      missing: one line for each missing part or obstacle.
      notes: contradictions in the inventories, to be reported.
    """

    kind: Literal[
        "nothing",
        "unrecoverable",
        "step_not_found",
        "state_mismatch",
        "host_state_count",
        "no_host_state",
        "foreign",
    ]
    step: int | None = None
    rejected: tuple[Rejection, ...] = ()
    missing: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    saved_count: int | None = None
    process_count: int | None = None
    notes: tuple[str, ...] = ()


def clip(text: str, limit_chars: int = MAX_REASON_CHARS) -> str:
    """Return ``text`` cut to the limit, because reasons travel and are logged."""
    valid = valid_text(text, limit_chars + 1)
    return valid if len(valid) <= limit_chars else f"{valid[: limit_chars - 3]}..."
