"""Time the rounds of a start and of a restore, over a real coordination service.

    python -m benchmarks.scale.rounds DIRECTORY CELL

JAX's service runs in a process of its own. This process is the leader and, in turn with it, each of
the other processes of the job: they speak, the leader answers, they learn. All of them run the
product's code over clients of JAX. DIRECTORY and CELL are those of ``benchmarks.scale.cell``.
"""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale import cell as cells
from benchmarks.scale.model import RUN_ID, SAVE, Shape, holder
from emergency_ckpt.cluster.coordination import Coordinator, JaxCoordinator, namespace
from emergency_ckpt.cluster.peers import Known, Peers, agree_start
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import Series, run_on_all
from emergency_ckpt.cluster.start_agreement import agree_settings
from emergency_ckpt.config.settings import Config
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.private_names import private_module
from emergency_ckpt.restore.rounds import RestoreRounds, Row
from emergency_ckpt.start import neighbours

_jax = private_module("jax._src.lib", "_jax", project="jax")._jax
_SERVICE = """
import sys, time
from jax._src.lib import _jax
service = _jax.get_distributed_runtime_service(sys.argv[1], 2)
print("up", flush=True)
for _ in sys.stdin:
    print(time.process_time(), flush=True)
"""
_AT_ONCE = 8
_DEADLINE_S = 3600.0


@dataclasses.dataclass
class Part:
    """The cost of one part.

    Attributes:
      leader_s: time from the last word of the others to the leader's last answer.
      leader_cpu_s: CPU time of the leader meanwhile, the calls of JAX's client included.
      leader_calls: calls of the service that the leader made, one after the other.
      calls: calls of all processes.
      service_cpu_s: CPU time of JAX's service for these calls.
    """

    leader_s: float = 0.0
    leader_cpu_s: float = 0.0
    leader_calls: int = 0
    calls: int = 0
    service_cpu_s: float = 0.0


class _NotYet(Exception):
    """A process would wait for a key."""


class _Client:
    """A client of JAX's that counts its calls. While the others speak, none of them waits."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self.is_speaking = False
        self.calls = 0

    def _count(self) -> Any:
        with self._lock:
            self.calls += 1
        return self._client

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._lock:
            if key in self._said:
                return  # said a second time, because it was not waited for
            self._said.add(key)
        self._count().key_value_set_bytes(key, value, allow_overwrite)

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        if self.is_speaking:
            raise _NotYet(key)
        return self._count().blocking_key_value_get_bytes(key, timeout_ms)

    def key_value_try_get_bytes(self, key: str) -> bytes:
        return self._count().key_value_try_get_bytes(key)

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        return self._count().key_value_dir_get_bytes(prefix)

    def key_value_delete(self, prefix: str) -> None:
        self._count().key_value_delete(prefix)


class _Service:
    """JAX's service in a process of its own, and the clients of the leader and of the others."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "up"
        clients = [_jax.get_distributed_runtime_client(address, node) for node in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.connect(), clients))
        self._clients = clients
        self.leader, self.others = map(_Client, clients)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.shutdown(), self._clients))
        self._process.kill()
        self._process.wait()


class Rounds:
    """The processes of one job, in turn, and what each part has cost."""

    def __init__(self, service: _Service, count: int) -> None:
        self._service = service
        self._count = count
        self.parts: dict[str, Part] = {}

    def coordinator(self, space: str, process: int) -> JaxCoordinator:
        client = self._service.others if process else self._service.leader
        return JaxCoordinator(client, space, process, self._count)

    @contextlib.contextmanager
    def part(self, name: str) -> Generator[Part]:
        """Count the calls of all processes while inside, and the service's time for them."""
        found = self.parts[name] = Part()
        service = self._service
        before, cpu_s = service.leader.calls + service.others.calls, service.cpu_s
        yield found
        found.service_cpu_s = service.cpu_s - cpu_s
        found.calls = service.leader.calls + service.others.calls - before

    @contextlib.contextmanager
    def led(self, part: Part) -> Generator[None]:
        """Time the leader while inside."""
        before, started_s, cpu_s = self._service.leader.calls, time.monotonic(), time.process_time()
        yield
        part.leader_cpu_s = time.process_time() - cpu_s
        part.leader_s = time.monotonic() - started_s
        part.leader_calls = self._service.leader.calls - before

    def speak(self, work: Callable[[int], object]) -> None:
        """Let each of the others work until it would wait."""

        def until_it_waits(process: int) -> None:
            with contextlib.suppress(_NotYet):
                work(process)

        self._service.others.is_speaking = True
        self.others(until_it_waits)
        self._service.others.is_speaking = False

    def others(self, work: Callable[[int], object]) -> None:
        """Let each of the others work."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(work, range(1, self._count)):
                pass

    def hold(self, name: str, work: Callable[[int], object]) -> None:
        """Let all work: the others until they wait, the leader, and the others to the end."""
        with self.part(name) as part:
            self.speak(work)
            with self.led(part):
                work(0)
            self.others(work)


def start(rounds: Rounds, count: int) -> list[Coordinator]:
    """Run the rounds of a start; return the coordinators that all have then."""
    first, space = namespace("", 0), namespace(RUN_ID, 0)
    settings = Config(run_id=RUN_ID, local_dir="none").shared_settings()
    rounds.hold(
        "settings",
        lambda me: agree_settings(rounds.coordinator(first, me), settings, _DEADLINE_S),
    )

    coordinators = [rounds.coordinator(space, process) for process in range(count)]

    def known(me: int) -> tuple[str, Known]:
        return f"10.{me >> 16 & 255}.{me >> 8 & 255}.{me & 255}:40123", Known(5, SAVE.step, SAVE)

    def hello(me: int) -> None:
        agree_start(coordinators[me], lambda: known(me), _DEADLINE_S)

    rounds.hold("hello", hello)

    def addresses(me: int) -> None:
        peers = Peers(coordinators[me], None)  # type: ignore[arg-type]  # it sends nothing
        for peer in neighbours(me, count):
            peers.address_of(peer)

    with rounds.part("addresses") as part:
        with rounds.led(part):
            addresses(0)
        rounds.others(addresses)
    _on_all(rounds, coordinators, "opened")
    return coordinators


def _on_all(
    rounds: Rounds, coordinators: list[Coordinator], part: str, name: str = "opened"
) -> None:
    watch = PreemptionWatch(None, grace_s=1)
    rounds.hold(
        part, lambda me: run_on_all(coordinators[me], name, lambda: None, watch, _DEADLINE_S)
    )


def restore(
    rounds: Rounds,
    coordinators: list[Coordinator],
    shape: Shape,
    digests: list[str],
    lost: str,
    peers: cells.Peers,
) -> cells.TimedLeader:
    """Run the rounds of a restore; return its leader, with the time of its work between them."""
    count, gone = shape.process_count, shape.lost(lost)
    leader = cells.leader_of(shape, peers)
    restores = [
        RestoreRounds(
            coordinators[me],
            "restore/0",
            Series(),
            shape.specs(),
            leader,
            deadline_s=time.monotonic() + _DEADLINE_S,
        )
        for me in range(count)
    ]

    def report(me: int) -> None:
        held = holder(shape, me, digests[me], gone)
        restores[me].hold(restores[me].report(held, wants_host_state=True))

    rounds.hold("report", report)
    part = rounds.parts["report"]
    part.leader_cpu_s -= leader.taken_s + leader.planned_s
    part.leader_s -= leader.lasted_s
    assert isinstance(leader.chosen, RestorePlan), leader.chosen
    rounds.hold("agree", lambda me: restores[me].hold(Row()))
    _on_all(rounds, coordinators, "ready", "restore/0/ready")
    return leader


def measure(directory: Path, cell: cells.Cell) -> dict[str, Any]:
    """Return the parts of one start and one restore."""
    places, digests = cells.read_places(directory)
    service, count = _Service(), cell.shape.process_count
    rounds = Rounds(service, count)
    coordinators = start(rounds, count)
    peers = cells.Peers(directory, places)
    leader = restore(rounds, coordinators, cell.shape, digests, cell.lost, peers)
    service.close()
    return {
        "processes": count,
        "parts": {name: dataclasses.asdict(part) for name, part in rounds.parts.items()},
        "inventories_s": leader.taken_s,
        "plan_s": leader.planned_s,
    }


def main() -> int:
    print(json.dumps(measure(Path(sys.argv[1]), cells.Cell(**json.loads(sys.argv[2])))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
