"""One cell of the scale table: one fresh process builds the job, another one times the leader.

    python -m benchmarks.scale.cell build DIRECTORY CELL
    python -m benchmarks.scale.cell lead DIRECTORY CELL

CELL is JSON: slices, hosts, leaves, placement, lost. The coordination service is simulated in
memory and counts the bytes.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from benchmarks.scale.job import (
    DEADLINE_S,
    Cell,
    NotYet,
    Peers,
    Processes,
    Service,
    TimedLeader,
    build,
    read_places,
    restore,
    timed_cpu,
)
from benchmarks.scale.model import SAVE, Shape
from emergency_ckpt.core.placement.placement_policies import place
from emergency_ckpt.core.restore.part import fetch_groups, missing_shards, own_shards
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.save.vote import Ballot, Vote


class MemoryService(Service):
    """The values of a service, and the bytes of names and values by process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.bytes_of: Counter[int] = Counter()

    def client(self, process: int) -> "_Client":
        return _Client(self, process)


class _Client:
    """The calls of JAX's client that ``JaxCoordinator`` uses. None waits: an early call fails."""

    def __init__(self, service: MemoryService, process: int) -> None:
        self._values, self._bytes_of, self._process = service.values, service.bytes_of, process

    def _count(self, *texts: str | bytes) -> None:
        self._bytes_of[self._process] += sum(map(len, texts))

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        del allow_overwrite
        if self._values.get(key) == value:
            return  # said a second time, because here nobody waits
        self._count(key, value)
        self._values[key] = value

    def blocking_key_value_get_bytes(self, key: str, _timeout_ms: int) -> bytes:
        if key not in self._values:
            raise NotYet(key)
        self._count(key, self._values[key])
        return self._values[key]

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        found = [(k, v) for k, v in self._values.items() if k.startswith(prefix + "/")]
        self._count(prefix, *(part for pair in found for part in pair))
        return found

    def key_value_delete(self, prefix: str) -> None:
        self._count(prefix)

    def key_value_try_get_bytes(self, key: str) -> bytes:
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")  # asked by who came too early


def lead(directory: Path, cell: Cell) -> dict[str, Any]:
    """Measure a save's vote and a restore of the job at its leader and between processes."""
    places, digests = read_places(directory)
    shape, policy = cell.shape, parse_placement(cell.placement)
    count, peers, service = shape.process_count, Peers(directory, places), MemoryService()
    place_s, _ = timed_cpu(lambda: place(policy, shape.topology, 1 % count, shape.held()))
    save = vote_bytes(digests)
    processes = Processes(service, count)
    leader = restore(processes, cell, digests, peers)
    return {
        **dataclasses.asdict(cell),
        "processes": count,
        "place_s": place_s,
        "save_bytes_per_process": max(save[process] for process in range(1, count)),
        "save_bytes": save.total(),
        "inventories_s": leader.taken_s,
        "plan_s": leader.planned_s - leader.searched_s,
        "divergence_s": leader.searched_s,
        "hand_out_s": processes.parts["report"].leader_cpu_s,
        "leader_bytes": leader.grown_bytes,
        "manifest_bytes": peers.read_bytes,
        "restore_bytes_per_process": max(service.bytes_of[process] for process in range(1, count)),
        "restore_bytes": service.bytes_of.total(),
        "busiest_to_mean": _busiest_to_mean(leader, shape),
    }


def vote_bytes(digests: list[str]) -> Counter[int]:
    """Return the bytes through the service of one save's vote, by process."""
    service = MemoryService()
    coordinators = Processes(service, len(digests)).coordinators
    votes = [Vote(coordinator, DEADLINE_S) for coordinator in coordinators]
    ballots = [Ballot(bytes.fromhex(digest), b"of eight") for digest in digests]
    for vote, ballot in zip(votes[1:], ballots[1:], strict=True):  # what each waits for is there
        vote.hand_in(SAVE, ballot)
    outcome = votes[0].cast(SAVE, ballots[0])
    assert outcome.kind == "complete", outcome
    for vote in votes[1:]:
        assert vote.learn(SAVE).kind == "complete"
    return service.bytes_of


def _busiest_to_mean(leader: TimedLeader, shape: Shape) -> float | None:
    """Return the busiest source's bytes as a multiple of the mean of all sources, or None."""
    sent: Counter[str] = Counter()
    manifests, targets = leader.manifests, shape.targets()
    for process, copies in leader.chosen.copies.items():
        own = own_shards(copies, targets[process], manifests)
        present = {manifests[g.digest].shard_id(index) for g in own for index in g.shards}
        missing = set(missing_shards(copies, targets[process], present))
        me = f"process/{process}"
        for group in fetch_groups(
            copies, targets[process], missing, me, lambda digest, _: manifests[digest]
        ):
            shards = manifests[group.digest].shards
            sent[group.sources[0]] += sum(shards[index].nbytes for index in group.shards)
    return max(sent.values()) * len(sent) / sent.total() if sent else None


def main() -> int:
    stage, directory, text = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    cell = Cell(**json.loads(text))
    if stage == "build":
        build(directory, cell)
    else:
        print(json.dumps(lead(directory, cell)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
