"""What each process makes of a choice: the shards that it reads, and those that it fetches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.part import fetch_groups, has_shards, missing_shards, own_shards
from emergency_ckpt.core.restore.plan_types import (
    Copies,
    FetchGroup,
    HostStateFetch,
    ManifestHolders,
    RestorePlan,
    TargetSet,
)
from emergency_ckpt.types import Contents, ShardId


class OwnRead(NamedTuple):
    """Shards in the process's own RAM, and who else has the manifest."""

    digest: str
    shards: tuple[int, ...]
    alternates: tuple[str, ...]


class Part(NamedTuple):
    """The part of one process."""

    local: tuple[OwnRead, ...]
    fetch: tuple[FetchGroup, ...]
    host_states: tuple[HostStateFetch, ...]


def parts_of(
    plan: RestorePlan, inventory: Inventory, targets: Mapping[int, TargetSet]
) -> dict[int, Part]:
    names = {h.process_index: h.holder for h in inventory.holders}
    return {
        process: _part_of(
            copies,
            inventory,
            targets[process],
            names.get(process, ""),
            plan.every_host_state or copies.host_states,
        )
        for process, copies in plan.copies.items()
    }


def _part_of(
    copies: Copies,
    inventory: Inventory,
    targets: TargetSet,
    me: str,
    host_states: tuple[HostStateFetch, ...],
) -> Part:
    manifests = inventory.manifests
    own = own_shards(copies, targets, manifests)
    present = {manifests[group.digest].shard_id(i) for group in own for i in group.shards}
    missing = set(missing_shards(copies, targets, present))

    def manifest_of(
        sources: Sequence[ManifestHolders], shards: Collection[ShardId]
    ) -> tuple[str, Contents]:
        digest = sources[0].digest
        assert has_shards(manifests[digest], shards)
        return digest, manifests[digest]

    fetch = fetch_groups(copies, targets, missing, me, manifest_of)
    reads = [OwnRead(g.digest, g.shards, _others(copies, g.digest, me)) for g in own]
    return Part(tuple(reads), tuple(fetch), host_states)


def _others(copies: Copies, digest: str, me: str) -> tuple[str, ...]:
    """The others who have all that this process reads from its own copy of a manifest."""
    lists = [
        source.holders
        for bundle in copies.bundles
        for source in bundle.sources
        if source.digest == digest
    ]
    first = lists[0] if lists else ()
    return tuple(h for h in first if h != me and all(h in holders for holders in lists))


def shards_text(indices: tuple[int, ...], count: int) -> str:
    return "all" if len(indices) == count else f"shards {','.join(map(str, indices))}"
