"""One cell of the scale table: one fresh process builds the job, another one times the leader.

    python -m benchmarks.scale.cell build DIRECTORY CELL
    python -m benchmarks.scale.cell lead DIRECTORY CELL

CELL is JSON: slices, hosts, leaves, placement, lost. The leader runs the code of a restore. The
coordination service and the peers are simulated in memory and count the bytes.
"""

import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec

from benchmarks.scale.model import RUN_ID, SAVE, Shape, contents_digest, holder, manifests
from emergency_ckpt.cluster.coordination import JaxCoordinator, namespace
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import Series, run_on_all
from emergency_ckpt.config.settings import Config
from emergency_ckpt.core.placement.placement_policies import place
from emergency_ckpt.core.restore.part import fetch_groups, missing_shards, own_shards
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.events import EventSink
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.leader import RestoreLeader
from emergency_ckpt.restore.request import RestoreRequest
from emergency_ckpt.restore.rounds import Answer, RestoreRounds, Row
from emergency_ckpt.save.vote import Ballot, Vote
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """The parameters of a cell. ``lost``: ``nothing``, ``host`` or ``slice``."""

    slices: int
    hosts: int
    leaves: int
    placement: str
    lost: str

    @property
    def shape(self) -> Shape:
        return Shape(self.slices, self.hosts, self.leaves)


class Service:
    """The coordination service: its values, and the bytes of names and values by process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.bytes_of: Counter[int] = Counter()

    def coordinator(self, process: int, count: int) -> JaxCoordinator:
        return JaxCoordinator(_Client(self, process), namespace(RUN_ID, 0), process, count)


class _NotYet(Exception):
    """A process would wait for a key."""


class _Client:
    """The calls of JAX's client that ``JaxCoordinator`` uses. None waits: an early call fails."""

    def __init__(self, service: Service, process: int) -> None:
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
            raise _NotYet(key)
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


class Peers:
    """The leader's tier and its client. Every manifest comes from a peer."""

    def __init__(self, directory: Path, places: dict[str, tuple[int, int]]) -> None:
        self._file = (directory / "manifests").open("rb", buffering=0)
        self._places = places
        self.read_bytes = 0

    def contents(self, _digest: str) -> None:
        return None

    def fetch_contents(self, _address: str, digest: str) -> bytes:
        start, size = self._places[digest]
        self.read_bytes += size
        return os.pread(self._file.fileno(), size, start)


class TimedLeader(RestoreLeader):
    """A leader that times its work in CPU seconds of its process, independent of other load.

    ``lasted_s``: the time of all of it by the clock.
    """

    taken_s = planned_s = searched_s = lasted_s = 0.0

    def take_reports(self, reports: Any) -> RestorePlan | None:
        started_s = time.monotonic()
        self.taken_s, ready = _cpu_s(lambda: super(TimedLeader, self).take_reports(reports))
        self.lasted_s += time.monotonic() - started_s
        return ready

    def plan(self, ready: RestorePlan | None = None) -> Answer:
        started_s = time.monotonic()
        self.planned_s, answer = _cpu_s(lambda: super(TimedLeader, self).plan(ready))
        self.lasted_s += time.monotonic() - started_s
        self.chosen, self.manifests = answer, self._inventory.manifests
        return answer

    def _settled(self, plan: RestorePlan, save: SaveId) -> RestorePlan:
        self.searched_s, settled = _cpu_s(lambda: super(TimedLeader, self)._settled(plan, save))
        return settled


def _cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    started_s = time.process_time()
    result = work()
    return time.process_time() - started_s, result


def build(directory: Path, cell: Cell) -> None:
    """Write the job's manifests and, for each process, the digest of the one it published."""
    places: dict[str, tuple[int, int]] = {}
    digests = [""] * cell.shape.process_count
    with (directory / "manifests").open("wb") as file:
        for encoded, processes in manifests(cell.shape, parse_placement(cell.placement)):
            digest = contents_digest(encoded)
            places[digest] = (file.tell(), len(encoded))
            file.write(encoded)
            for process in processes:
                digests[process] = digest
    (directory / "places.json").write_bytes(msgspec.json.encode([places, digests]))


def read_places(directory: Path) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return what ``build`` wrote: the place of each manifest by digest, and each one's digest."""
    return msgspec.json.decode(
        (directory / "places.json").read_bytes(),
        type=tuple[dict[str, tuple[int, int]], list[str]],
    )


def lead(directory: Path, cell: Cell) -> dict[str, Any]:
    """Measure a save's vote and a restore of the job at its leader and between processes."""
    places, digests = read_places(directory)
    shape, policy = cell.shape, parse_placement(cell.placement)
    place_s, _ = _cpu_s(
        lambda: place(policy, shape.topology, 1 % shape.process_count, shape.held())
    )
    save = vote_bytes(digests)
    return {
        **dataclasses.asdict(cell),
        "processes": shape.process_count,
        "place_s": place_s,
        "save_bytes_per_process": max(save[p] for p in range(1, shape.process_count)),
        "save_bytes": save.total(),
        **_restore(shape, digests, cell.lost, Peers(directory, places)),
    }


def vote_bytes(digests: list[str]) -> Counter[int]:
    """Return the bytes through the service of one save's vote, by process."""
    service, count = Service(), len(digests)
    votes = [Vote(service.coordinator(process, count), DEADLINE_S) for process in range(count)]
    ballots = [Ballot(bytes.fromhex(digest), b"of eight") for digest in digests]
    for process in range(1, count):  # what each waits for is then there
        votes[process].hand_in(SAVE, ballots[process])
    outcome = votes[0].cast(SAVE, ballots[0])
    assert outcome.kind == "complete", outcome
    for vote in votes[1:]:
        assert vote.learn(SAVE).kind == "complete"
    return service.bytes_of


def leader_of(shape: Shape, peers: Peers) -> TimedLeader:
    """Return the leader of a restore of the job's newest step, which asks ``peers``."""
    events = EventSink(None, process_index=0)
    parts: Any = SimpleNamespace(
        holdings=peers,
        client=peers,
        persistent=None,
        events=events,
        config=Config(run_id=RUN_ID, local_dir="none"),
    )
    request = RestoreRequest(shape.tree(), None, None, wants_host_state=True, retained=None)
    end_s = time.monotonic() + DEADLINE_S
    calls = HolderCalls(events, WorkProgress.until(end_s))
    return TimedLeader(parts, request, shape.targets(), calls, end_s)


def _restore(shape: Shape, digests: list[str], lost: str, peers: Peers) -> dict[str, Any]:
    service, count, gone = Service(), shape.process_count, shape.lost(lost)
    leader = leader_of(shape, peers)
    rounds = [
        RestoreRounds(
            service.coordinator(process, count),
            "restore/0",
            Series(),
            shape.specs(),
            leader,
            deadline_s=time.monotonic() + DEADLINE_S,
        )
        for process in range(count)
    ]

    def report(process: int) -> Row:
        held = holder(shape, process, digests[process], gone)
        return rounds[process].report(held, wants_host_state=True)

    for process in range(count - 1, 0, -1):
        _speak(lambda process=process: rounds[process].hold(report(process)))
    own, before_bytes = report(0), _resident_bytes()
    led_s, _ = _cpu_s(lambda: rounds[0].hold(own))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan = leader.chosen
    assert isinstance(plan, RestorePlan), plan
    for process in range(1, count):
        rounds[process].hold(report(process))
    _finish(service, rounds)
    per_process = [service.bytes_of[process] for process in range(1, count)]
    return {
        "inventories_s": leader.taken_s,
        "plan_s": leader.planned_s - leader.searched_s,
        "divergence_s": leader.searched_s,
        "hand_out_s": led_s - leader.taken_s - leader.planned_s,
        "leader_bytes": max(0, peak_bytes - before_bytes),
        "manifest_bytes": peers.read_bytes,
        "restore_bytes_per_process": max(per_process),
        "restore_bytes": service.bytes_of.total(),
        "busiest_to_mean": _busiest_to_mean(plan, leader, shape),
    }


def _speak(work: Callable[[], object]) -> None:
    """Let a process work until it would wait."""
    with contextlib.suppress(_NotYet):
        work()


def _finish(service: Service, rounds: list[RestoreRounds]) -> None:
    """Finish the restore: all have their part, and settle.

    The others speak first and learn nothing yet, the leader then answers, and they learn.
    """
    count, watch = len(rounds), PreemptionWatch(None, grace_s=1)

    def in_turn(hold: Callable[[int], object]) -> None:
        for process in range(1, count):
            _speak(lambda process=process: hold(process))
        for process in range(count):
            hold(process)

    in_turn(lambda process: rounds[process].hold(Row()))
    in_turn(
        lambda process: run_on_all(
            service.coordinator(process, count), "restore/0/ready", lambda: None, watch, DEADLINE_S
        )
    )


def _busiest_to_mean(plan: RestorePlan, leader: TimedLeader, shape: Shape) -> float | None:
    """Return the busiest source's bytes as a multiple of the mean of all sources, or None."""
    sent: Counter[str] = Counter()
    manifests, targets = leader.manifests, shape.targets()
    for process, copies in plan.copies.items():
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


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
