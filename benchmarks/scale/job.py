"""A whole job in one process: the leader and, in turn with it, all others run the package's code.

The others speak until each would wait, the leader answers, and the others go on. The manifests are
in a file, from which the leader reads them in the place of peers.
"""

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from benchmarks.scale.model import RUN_ID, Shape, holder, manifests
from emergency_ckpt.cluster.coordination import JaxCoordinator, namespace
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import Series, run_on_all
from emergency_ckpt.config.settings import Config
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.events import EventSink
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.ram.manifest import contents_digest
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.leader import RestoreLeader
from emergency_ckpt.restore.request import RestoreRequest
from emergency_ckpt.restore.rounds import Answer, RestoreRounds, Row
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Cell(Shape):
    """The parameters of a job. ``lost``: ``nothing``, ``host`` or ``slice``."""

    placement: str
    lost: str


class NotYet(Exception):
    """A process would wait for a key."""


class Service(Protocol):
    """A coordination service."""

    def connection(self, process: int) -> Any:
        """Return a client of the service as JAX has it, for one process."""

    def cpu_s(self) -> float:
        """Return the CPU time of the service so far."""


class Client:
    """The calls of JAX's client that ``JaxCoordinator`` uses, counted, by one process.

    Attributes:
      is_speaking: a call that would wait raises NotYet, and what was said before is not said again.
      calls: number of calls so far.
      moved_bytes: bytes of the names and values that were sent and received so far.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._said: dict[str, bytes] = {}
        self.is_speaking = False
        self.calls = self.moved_bytes = 0

    def _count(self, *texts: str | bytes) -> None:
        self.calls += 1
        self.moved_bytes += sum(map(len, texts))

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        if self._said.get(key) == value:
            return  # said a second time, because the first was not waited for
        self._said[key] = value
        self._count(key, value)
        self._connection.key_value_set_bytes(key, value, allow_overwrite)

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        if self.is_speaking:
            raise NotYet(key)
        value = self._connection.blocking_key_value_get_bytes(key, timeout_ms)
        self._count(key, value)
        return value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        self._count()  # who asks has come too early, which a job need not have
        return self._connection.key_value_try_get_bytes(key)

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        found = self._connection.key_value_dir_get_bytes(prefix)
        self._count(prefix, *(part for pair in found for part in pair))
        return found

    def key_value_delete(self, prefix: str) -> None:
        self._count(prefix)
        self._connection.key_value_delete(prefix)


@dataclasses.dataclass
class Part:
    """The cost of one round of all processes.

    Attributes:
      leader_s: time from the last word of the others to the leader's last answer.
      leader_cpu_s: CPU time of the leader meanwhile, the calls of JAX's client included.
      leader_calls: calls of the service that the leader made, one after the other.
      calls: calls of all processes.
      service_cpu_s: CPU time of the service for these calls.
    """

    leader_s: float = 0.0
    leader_cpu_s: float = 0.0
    leader_calls: int = 0
    calls: int = 0
    service_cpu_s: float = 0.0


class Processes:
    """The processes of one job, ``at_once`` of the others at a time, and what each part cost."""

    def __init__(self, service: Service, count: int, at_once: int = 1) -> None:
        self._service = service
        self._at_once = at_once
        self.count = count
        self.clients = [Client(service.connection(process)) for process in range(count)]
        self.coordinators = [self.coordinator(RUN_ID, process) for process in range(count)]
        self.parts: dict[str, Part] = {}

    def coordinator(self, run_id: str, process: int) -> JaxCoordinator:
        return JaxCoordinator(
            self.clients[process], namespace(run_id.ljust(16, "0")), process, self.count
        )

    def hold(self, name: str, work: Callable[[int], object]) -> None:
        """Let all work: the others until they wait, the leader, and the others to the end."""
        part, leader = Part(), self.clients[0]
        self.parts[name] = part
        calls_before, service_cpu_s = self._calls(), self._service.cpu_s()
        for client in self.clients:
            client.is_speaking = True
        self._others(lambda process: _until_it_waits(work, process))
        for client in self.clients:
            client.is_speaking = False
        leader_calls = leader.calls
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        work(0)
        part.leader_cpu_s = time.process_time() - began_cpu_s
        part.leader_s = time.monotonic() - began_s
        part.leader_calls = leader.calls - leader_calls
        self._others(work)
        part.service_cpu_s = self._service.cpu_s() - service_cpu_s
        part.calls = self._calls() - calls_before

    def _calls(self) -> int:
        return sum(client.calls for client in self.clients)

    def run_on_all(self, part: str, name: str) -> None:
        """Wait as the processes do after a step that must succeed on all of them."""
        watch = PreemptionWatch(None, grace_s=1)
        self.hold(
            part,
            lambda me: run_on_all(self.coordinators[me], name, lambda: None, watch, DEADLINE_S),
        )

    def _others(self, work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(self._at_once) as pool:
            for _ in pool.map(work, range(1, self.count)):
                pass


def _until_it_waits(work: Callable[[int], object], process: int) -> None:
    with contextlib.suppress(NotYet):
        work(process)


@dataclasses.dataclass(frozen=True)
class Stored:
    """The manifests of a job, in a file.

    Attributes:
      places: offset and size of each manifest, by its digest.
      digests: the digest of each process's manifest.
      sets: of the shards in each process's manifest.
    """

    path: Path
    places: dict[str, tuple[int, int]]
    digests: list[str]
    sets: list[dict[str, str]]


class Peers:
    """The leader's tier and its client. Every manifest comes from a peer.

    ``fetched``: number of manifests that the leader has fetched.
    """

    def __init__(self, stored: Stored) -> None:
        self.fetched = 0
        self._path = stored.path
        self._places = stored.places

    def contents(self, _digest: str) -> None:
        return None

    def fetch_contents(self, _address: str, digest: str) -> bytes:
        self.fetched += 1
        start, size = self._places[digest]
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, start)


class TimedLeader(RestoreLeader):
    """A leader that times its work in CPU seconds of its process, independent of other load.

    ``lasted_s``: the time of all of it by the clock. ``grown_bytes``: the growth of this process
    meanwhile. ``peers``: from which it reads manifests.
    """

    peers: Peers

    taken_s = read_s = planned_s = searched_s = lasted_s = 0.0
    grown_bytes = 0

    def take_reports(self, reports: Any) -> RestorePlan | None:
        self._resident_bytes = _resident_bytes()
        started_s = time.monotonic()
        taken_s, ready = timed_cpu(lambda: super(TimedLeader, self).take_reports(reports))
        self.taken_s += taken_s
        self.lasted_s += time.monotonic() - started_s
        return ready

    def plan(self, ready: RestorePlan | None = None) -> Answer:
        started_s = time.monotonic()
        self.read_s = 0.0
        planned_s, answer = timed_cpu(lambda: super(TimedLeader, self).plan(ready))
        self.planned_s = planned_s - self.read_s
        self.taken_s += self.read_s
        self.lasted_s += time.monotonic() - started_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.grown_bytes = max(0, peak_bytes - self._resident_bytes)
        self.chosen, self.manifests = answer, self._inventory.manifests
        return answer

    def _read_more(self, answer: RestorePlan | NoPlan, *, is_patient: bool) -> bool:
        read_s, has_read = timed_cpu(
            lambda: super(TimedLeader, self)._read_more(answer, is_patient=is_patient)
        )
        self.read_s += read_s
        return has_read

    def _settled(self, plan: RestorePlan, save: SaveId) -> RestorePlan:
        self.searched_s, settled = timed_cpu(lambda: super(TimedLeader, self)._settled(plan, save))
        return settled


def timed_cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of ``work``, and its result."""
    started_s = time.process_time()
    result = work()
    return time.process_time() - started_s, result


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def build(directory: Path, cell: Cell) -> Stored:
    """Write the job's manifests into ``directory``."""
    count = cell.process_count
    stored = Stored(directory / "manifests", {}, [""] * count, [{}] * count)
    with stored.path.open("wb") as file:
        for encoded, sets, processes in manifests(cell, parse_placement(cell.placement)):
            digest = contents_digest(encoded)
            stored.places[digest] = (file.tell(), len(encoded))
            file.write(encoded)
            for process in processes:
                stored.digests[process], stored.sets[process] = digest, sets
    return stored


def restore(processes: Processes, cell: Cell, stored: Stored) -> TimedLeader:
    """Run the rounds of a restore; return its leader, whose work is not in the part "report"."""
    gone = cell.lost_processes(cell.lost)
    leader = _leader_of(cell, Peers(stored))
    needs = [cell.needs_of(host) for host in range(cell.hosts)]
    restores = [
        RestoreRounds(
            coordinator,
            "restore/0",
            Series(),
            cell.specs(),
            leader,
            deadline_s=time.monotonic() + DEADLINE_S,
        )
        for coordinator in processes.coordinators
    ]

    def report(me: int) -> None:
        held = holder(cell, me, stored.digests[me], stored.sets[me], gone)
        row = restores[me].report(held, wants_host_state=True, needs=needs[me % cell.hosts])
        restores[me].hold(row)

    processes.hold("report", report)
    part = processes.parts["report"]
    part.leader_cpu_s -= leader.taken_s + leader.planned_s
    part.leader_s -= leader.lasted_s
    assert isinstance(leader.chosen, RestorePlan), leader.chosen
    processes.hold("agree", lambda me: restores[me].hold(Row()))
    processes.run_on_all("ready", "restore/0/ready")
    return leader


def _leader_of(shape: Shape, peers: Peers) -> TimedLeader:
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
    calls = HolderCalls(parts.client, events, WorkProgress.until(end_s))
    leader = TimedLeader(parts, request, shape.targets(), calls, end_s)
    leader.peers = peers
    return leader
