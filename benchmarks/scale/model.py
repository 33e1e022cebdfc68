"""Model of a job of any size after a save, as the leader of a restore sees it."""

import dataclasses
import hashlib
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

from emergency_ckpt.core.placement import (
    HeldLeaves,
    PlacementPolicy,
    Topology,
    place_on,
)
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
from emergency_ckpt.core.restore.plan_types import TargetSet
from emergency_ckpt.core.shard_layout import lay_out, shard_nbytes, shard_sets, shards_by_set
from emergency_ckpt.ram.manifest import build_contents, encode_contents
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardId

RUN_ID = f"{'a-training-run':->40}-{'0' * 16}"  # as long as one that follows from a directory
SAVE = SaveId(1_234_560, f"{1234:012d}-{'5e' * 8}", RUN_ID)
ROWS, COLUMNS = 8, 8192  # of a host's part of a sharded leaf
SMALL_ELEMENTS = 4096
REPLICATED_ONE_IN = 6


@dataclasses.dataclass(frozen=True)
class Shape:
    """A job of ``slices`` times ``hosts`` processes; each has one box of each sharded leaf."""

    slices: int
    hosts: int
    leaves: int

    @property
    def process_count(self) -> int:
        return self.slices * self.hosts

    @property
    def topology(self) -> Topology:
        processes = range(self.process_count)
        return Topology(self.process_count, tuple(p // self.hosts for p in processes))

    def specs(self) -> dict[str, LeafSpec]:
        """Return the leaves: sharded weights, and norms of which every host has a whole copy."""
        found: dict[str, LeafSpec] = {}
        for number in range(self.leaves):
            if number % REPLICATED_ONE_IN == REPLICATED_ONE_IN - 1:
                path = f"params/layers_{number:04}/norm/scale"
                found[path] = LeafSpec(path, "float32", (SMALL_ELEMENTS,))
            else:
                path = f"opt_state/mu/layers_{number:04}/mlp/kernel"
                found[path] = LeafSpec(path, "bfloat16", (self.hosts * ROWS, COLUMNS))
        return dict(sorted(found.items()))

    def box(self, spec: LeafSpec, host: int) -> Box:
        if len(spec.global_shape) == 1:
            return ((0, SMALL_ELEMENTS),)
        return ((host * ROWS, (host + 1) * ROWS), (0, COLUMNS))

    def group_of(self, shard: ShardId) -> int:
        """Return a number that shards share which the same processes need."""
        return self.hosts if len(shard.box) == 1 else shard.box[0][0] // ROWS

    def needs_of(self, host: int) -> tuple[str, ...]:
        """Return the names of the sets of shards that a host needs, as ``BoxTable.needs_of``."""
        specs = self.specs()
        shards = [ShardId(path, self.box(spec, host)) for path, spec in specs.items()]
        return tuple(sorted(shards_by_set(specs.values(), shards, map(self.group_of, shards))))

    def held(self) -> tuple[HeldLeaves, ...]:
        """Return one entry for each of the two kinds of leaves, as ``BoxTable.held_leaves``."""
        everyone, specs = tuple(range(self.process_count)), self.specs()
        kinds: dict[tuple[int, ...], dict[str, int]] = {}
        for path, spec in specs.items():
            item_bytes = 2 if spec.dtype == "bfloat16" else 4
            kinds.setdefault(spec.global_shape, {})[path] = item_bytes
        found: list[HeldLeaves] = []
        for shape, items in kinds.items():
            spec, holders = specs[next(iter(items))], dict[Box, tuple[int, ...]]()
            for host in range(self.hosts):
                holders[self.box(spec, host)] = everyone[host :: self.hosts]
            if len(holders) < self.hosts:
                holders = dict.fromkeys(holders, everyone)
            found.append(HeldLeaves(shape, items, holders))
        return tuple(found)

    def targets(self) -> dict[int, TargetSet]:
        """Return the needs of each process, as ``BoxTable.targets``; replicas share an object."""
        specs = self.specs()
        shared = [
            tuple(ShardId(path, self.box(spec, host)) for path, spec in specs.items())
            for host in range(self.hosts)
        ]
        return {process: shared[process % self.hosts] for process in range(self.process_count)}

    def tree(self) -> Any:
        """Return the part of a tree of leaves that a restore uses: the specs."""
        return SimpleNamespace(wanted=self.specs())

    def lost_processes(self, kind: str) -> range:
        """Return the processes that lose their RAM: none, one host's, or the last slice's."""
        count = {"nothing": 0, "host": 1, "slice": self.hosts}[kind]
        return range(self.process_count - count, self.process_count)


def manifests(
    shape: Shape, policy: PlacementPolicy
) -> Iterator[tuple[bytes, dict[str, str], list[int]]]:
    """Yield each distinct manifest, encoded, with its sets of shards and the publishers."""
    specs = shape.specs()
    by_shards: dict[tuple[ShardId, ...], list[int]] = {}
    everyone = range(shape.process_count)
    for process, shards in place_on(policy, shape.topology, everyone, shape.held()).items():
        by_shards.setdefault(shards, []).append(process)
    for shards, processes in by_shards.items():
        layout = lay_out(
            tuple(specs.values()), [(s, shard_nbytes(specs[s.leaf], s.box)) for s in shards]
        )
        crcs = [3_735_928_559] * len(layout.shards)
        contents = build_contents(SAVE, specs.values(), layout, crcs)
        yield (
            encode_contents(contents),
            shard_sets(contents, map(shape.group_of, shards)),
            processes,
        )


def holder(
    shape: Shape, process: int, digest: str, sets: dict[str, str], lost: Collection[int]
) -> HolderInventory:
    """Return the report of ``process``: its tensors, its host state and those of its wards.

    ``sets``: of the shards in the manifest ``digest``.
    """
    address = f"10.{process >> 16 & 255}.{process >> 8 & 255}.{process & 255}:40123"
    if process in lost:
        return HolderInventory(f"process/{process}", process, address, (), ())
    position = process % shape.hosts
    wards = [process, *range(position, shape.process_count, shape.hosts)]
    return HolderInventory(
        f"process/{process}",
        process,
        address,
        (HeldTensors(SAVE, digest),),
        tuple(
            HeldHostState(SAVE, ward, shape.process_count, _digest(f"state {ward}"), 4096, False)
            for ward in dict.fromkeys(wards)
        ),
        SAVE,
        sets={digest: sets},
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
