"""A small job on paper: machines with RAM, saves, losses and restarts, as planner inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.placement import (
    AllButPrimary,
    HeldLeaves,
    PlacementPolicy,
    Topology,
    buddies,
    place,
)
from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    HolderInventory,
    Inventory,
    PersistentStep,
    Quarantined,
)
from emergency_ckpt.core.shard_layout import shard_sets, shards_by_set
from emergency_ckpt.types import Box, Contents, LeafSpec, SaveId, ShardEntry, ShardId

RUN = "run"


@dataclass(frozen=True)
class Layout:
    """How the state lies on the job: ``sharded`` leaves are cut along axis 0 inside a slice."""

    slices: int
    hosts: int
    rows: int = 8
    sharded: tuple[str, ...] = ("w",)
    replicated: tuple[str, ...] = ("b",)
    placement: PlacementPolicy = field(default_factory=AllButPrimary)

    @property
    def process_count(self) -> int:
        return self.slices * self.hosts

    @property
    def topology(self) -> Topology:
        return Topology(
            self.process_count, tuple(p // self.hosts for p in range(self.process_count))
        )

    def leaves(self) -> dict[str, LeafSpec]:
        specs = {path: LeafSpec(path, "float32", (self.rows, 2)) for path in self.sharded}
        specs |= {path: LeafSpec(path, "float32", (3,)) for path in self.replicated}
        return dict(sorted(specs.items()))

    def box(self, path: str, process: int) -> Box:
        """The box of a leaf on the device of a process."""
        if path in self.replicated:
            return ((0, 3),)
        position, rows = process % self.hosts, self.rows // self.hosts
        return ((position * rows, (position + 1) * rows), (0, 2))

    def shards(self, process: int) -> tuple[ShardId, ...]:
        return tuple(ShardId(path, self.box(path, process)) for path in self.leaves())

    def targets(self) -> dict[int, tuple[ShardId, ...]]:
        return {process: self.shards(process) for process in range(self.process_count)}

    def held(self) -> tuple[HeldLeaves, ...]:
        """Who holds what, as ``place`` wants it."""
        found: list[HeldLeaves] = []
        for path, spec in self.leaves().items():
            holders: dict[Box, tuple[int, ...]] = {}
            for process in range(self.process_count):
                box = self.box(path, process)
                holders[box] = (*holders.get(box, ()), process)
            found.append(HeldLeaves(spec.global_shape, {path: 4}, holders))
        return tuple(found)

    def stored(self, process: int) -> tuple[ShardId, ...]:
        """What the process stores."""
        return place(self.placement, self.topology, process, self.held())


def with_sets(
    inventory: Inventory, targets: Mapping[int, tuple[ShardId, ...]], leaves: Mapping[str, LeafSpec]
) -> Inventory:
    """The inventory as processes report it: with the sets of shards that they hold and need."""
    who: dict[ShardId, set[int]] = {}
    for process, shards in targets.items():
        for shard in shards:
            who.setdefault(shard, set()).add(process)
    numbers: dict[frozenset[int], int] = {}
    groups = {s: numbers.setdefault(frozenset(ps), len(numbers)) for s, ps in sorted(who.items())}
    sets: dict[str, dict[str, str]] = {}
    for digest, contents in inventory.manifests.items():
        if all(0 <= entry.leaf < len(contents.leaves) for entry in contents.shards):
            in_it = [groups.get(contents.shard_id(n)) for n in range(len(contents.shards))]
            known = [group for group in in_it if group is not None]
            if len(known) == len(in_it):
                sets[digest] = shard_sets(contents, known)
    needs = {
        process: tuple(
            sorted(shards_by_set(leaves.values(), in_order, [groups[s] for s in in_order]))
        )
        for process, shards in targets.items()
        for in_order in [sorted(shards)]
    }
    holders = [
        msgspec.structs.replace(
            holder, sets={t.digest: sets[t.digest] for t in holder.tensors if t.digest in sets}
        )
        for holder in inventory.holders
    ]
    return msgspec.structs.replace(inventory, holders=tuple(holders), needs=needs)


@dataclass
class Machine:
    """One host's RAM."""

    tensors: list[HeldTensors] = field(default_factory=list)
    host_states: list[HeldHostState] = field(default_factory=list)
    known_complete: SaveId | None = None


def contents_of(
    save: SaveId, leaves: dict[str, LeafSpec], shards: tuple[ShardId, ...], crc: int = 0
) -> Contents:
    """Contents that store ``shards`` one after the other."""
    order = sorted(leaves)
    entries: list[ShardEntry] = []
    offset = 0
    for shard in sorted(shards):
        nbytes = 4 * volume(shard.box)
        entries.append(ShardEntry(order.index(shard.leaf), shard.box, offset, nbytes, crc))
        offset += -(-nbytes // 64) * 64
    return Contents(save, tuple(leaves[path] for path in order), tuple(entries))


class PlannerWorld:
    """Machines stay, processes come and go: ``process_of`` says who runs where in this life."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.machines = [Machine() for _ in range(layout.process_count)]
        self.process_of = list(range(layout.process_count))
        self.manifests: dict[str, Contents] = {}
        self.persistent: list[PersistentStep] = []
        self.quarantined: set[Quarantined] = set()
        self.served: list[Machine] = []

    def machine(self, process: int) -> Machine:
        return self.machines[self.process_of.index(process)]

    def save(
        self,
        step: int,
        incarnation: str,
        by: list[int] | None = None,
        *,
        empty: bool = False,
        complete: bool = False,
    ) -> SaveId:
        """Processes ``by`` (all when None) publish tensors and host state, and push the latter."""
        layout, save = self.layout, SaveId(step, incarnation, RUN)
        for process in range(layout.process_count) if by is None else by:
            contents = contents_of(save, layout.leaves(), layout.stored(process))
            machine = self.machine(process)
            machine.tensors.append(HeldTensors(save, self.publish(contents)))
            text = f"{step}{incarnation}/{process}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            state = HeldHostState(save, process, layout.process_count, digest, 10, empty)
            for keeper in (process, *buddies(process, layout.topology)):
                self.machine(keeper).host_states.append(state)
        if complete:
            for machine in self.machines:
                machine.known_complete = save
        return save

    def publish(self, contents: Contents) -> str:
        """The digest of the contents: ``<step><incarnation>.<n>``, short for people to read."""
        for digest, known in self.manifests.items():
            if known == contents:
                return digest
        prefix = f"{contents.save.step}{contents.save.incarnation}."
        digest = f"{prefix}{sum(known.startswith(prefix) for known in self.manifests)}"
        self.manifests[digest] = contents
        return digest

    def serve(self, process: int) -> None:
        """The machine leaves the job, a server of its RAM stays; an empty one takes its place."""
        self.served.append(self.machine(process))
        self.lose(process)

    def lose(self, process: int) -> None:
        self.machines[self.process_of.index(process)] = Machine()

    def restart(self, layout: Layout, process_of: list[int] | None = None) -> None:
        """A new life: machine i runs process ``process_of[i]``; those beyond the job are gone."""
        count = layout.process_count
        self.layout = layout
        self.machines = (self.machines + [Machine() for _ in range(count)])[:count]
        self.process_of = process_of or list(range(count))

    def inventory(self) -> Inventory:
        holders = [
            HolderInventory(
                f"process/{process}",
                process,
                f"10.0.0.{process}:7000",
                tuple(machine.tensors),
                tuple(machine.host_states),
                machine.known_complete,
            )
            for process, machine in zip(self.process_of, self.machines, strict=True)
        ]
        for number, machine in enumerate(self.served):
            address = f"10.0.1.{number}:9000"
            holders.append(
                HolderInventory(
                    f"server/{address}",
                    None,
                    address,
                    tuple(machine.tensors),
                    tuple(machine.host_states),
                )
            )
        return Inventory(
            tuple(holders),
            dict(self.manifests),
            tuple(self.persistent),
            frozenset(self.quarantined),
        )
