"""A job of any size on paper: who holds what after two saves, as a restore's leader sees it."""

import dataclasses
import hashlib
from collections.abc import Collection

from emergency_ckpt.core.inventory import HeldHostState, HeldTensors, HolderInventory, Inventory
from emergency_ckpt.core.placement import PlacementPolicy, Topology, place_all
from emergency_ckpt.core.plan_types import TargetSet
from emergency_ckpt.core.striping import HeldLeaves
from emergency_ckpt.tiers.manifest import (
    build_contents,
    contents_digest,
    decode_contents,
    encode_contents,
    lay_out,
)
from emergency_ckpt.types import Box, Contents, LeafSpec, SaveId, ShardId

RUN_ID = f"{'a-training-run':-<40}-{'0' * 16}"  # as long as one that follows from a directory
INCARNATION = f"{0x0198F2C4A1B0:012x}-{'5e' * 8}"
STEP = 1_234_560
ROWS = 8  # of a sharded leaf, on each host
COLUMNS = 8192
SMALL_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Shape:
    """A job: ``slices`` of ``hosts`` processes, ``leaves`` of which one in six is replicated."""

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
        """Sharded weights and their moments, and norms that every host has whole."""
        found: dict[str, LeafSpec] = {}
        for number in range(self.leaves):
            if number % 6 == 5:
                path = f"params/layers_{number:03}/norm/scale"
                found[path] = LeafSpec(path, "float32", (SMALL_ELEMENTS,))
            else:
                path = f"opt_state/mu/layers_{number:03}/mlp/kernel"
                found[path] = LeafSpec(path, "bfloat16", (self.hosts * ROWS, COLUMNS))
        return dict(sorted(found.items()))

    def held(self) -> tuple[HeldLeaves, ...]:
        """Two kinds of leaves: cut over the hosts of a slice, and whole on each."""
        everyone = tuple(range(self.process_count))
        cut: dict[Box, tuple[int, ...]] = {
            ((host * ROWS, (host + 1) * ROWS), (0, COLUMNS)): everyone[host :: self.hosts]
            for host in range(self.hosts)
        }
        specs = self.specs()
        sharded = {path: 2 for path, spec in specs.items() if len(spec.global_shape) == 2}
        whole = {path: 4 for path, spec in specs.items() if len(spec.global_shape) == 1}
        return (
            HeldLeaves((self.hosts * ROWS, COLUMNS), sharded, cut),
            HeldLeaves((SMALL_ELEMENTS,), whole, {((0, SMALL_ELEMENTS),): everyone}),
        )

    def targets(self) -> dict[int, TargetSet]:
        """What each process needs, as ``BoxTable.targets`` gives it."""
        shared: list[TargetSet] = []
        for host in range(self.hosts):
            box: Box = ((host * ROWS, (host + 1) * ROWS), (0, COLUMNS))
            whole: Box = ((0, SMALL_ELEMENTS),)
            shared.append(
                tuple(
                    ShardId(path, box if len(spec.global_shape) == 2 else whole)
                    for path, spec in self.specs().items()
                )
            )
        return {process: shared[process % self.hosts] for process in range(self.process_count)}


class SavedJob:
    """What every process of a job has published: one save, the same bits on all replicas."""

    def __init__(self, shape: Shape, policy: PlacementPolicy) -> None:
        self.shape = shape
        self.save = SaveId(STEP, INCARNATION, RUN_ID)
        self.encoded: dict[str, bytes] = {}
        specs = shape.specs()
        self.digests: dict[int, str] = {}
        known: dict[tuple[ShardId, ...], str] = {}
        stored = place_all(policy, shape.topology, shape.held())
        for process in range(shape.process_count):
            shards = stored[process]
            digest = known.get(shards)
            if digest is None:
                digest = known[shards] = self._publish(specs, shards)
            self.digests[process] = digest
        self._states = {
            p: HeldHostState(self.save, p, shape.process_count, _digest(f"state {p}"), 4096, False)
            for p in range(shape.process_count)
        }

    def _publish(self, specs: dict[str, LeafSpec], shards: tuple[ShardId, ...]) -> str:
        layout = lay_out(specs.values(), [(s, _nbytes(specs[s.leaf], s.box)) for s in shards])
        contents = build_contents(
            self.save, specs.values(), layout, [0xDEADBEEF] * len(layout.shards)
        )
        encoded = encode_contents(contents)
        digest = contents_digest(encoded)
        self.encoded[digest] = encoded
        return digest

    def holder(self, process: int, *, lost: bool) -> HolderInventory:
        """What ``process`` reports: its tensors, its host state and those of its wards."""
        topology, wards = self.shape.topology, [process]
        position, hosts = process % self.shape.hosts, self.shape.hosts
        wards += [p for p in range(position, topology.process_count, hosts) if p != process]
        return HolderInventory(
            f"process/{process}",
            process,
            f"10.{process >> 16 & 255}.{process >> 8 & 255}.{process & 255}:40123",
            () if lost else (HeldTensors(self.save, self.digests[process]),),
            () if lost else tuple(self._states[ward] for ward in wards),
            None if lost else self.save,
        )

    def read_manifests(self, digests: Collection[str]) -> dict[str, Contents]:
        """Decoded and checked, as the leader does with what it fetches."""
        return {digest: decode_contents(self.encoded[digest], digest) for digest in digests}

    def inventory(self, lost: Collection[int]) -> Inventory:
        """The leader's view when ``lost`` came back empty."""
        holders = tuple(
            self.holder(process, lost=process in lost)
            for process in range(self.shape.process_count)
        )
        held = {tensors.digest: None for holder in holders for tensors in holder.tensors}
        return Inventory(holders, self.read_manifests(held))


def _nbytes(spec: LeafSpec, box: Box) -> int:
    elements = 1
    for start, stop in box:
        elements *= stop - start
    return elements * (2 if spec.dtype == "bfloat16" else 4)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
