"""Time the rounds of a start and of a restore, over a real coordination service.

    python -m benchmarks.scale.rounds DIRECTORY CELL

JAX's service runs in a process of its own. All processes of the job run the product's code over
clients of JAX in this one (see ``job``). DIRECTORY and CELL are those of ``benchmarks.scale.cell``.
"""

import dataclasses
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale.job import (
    DEADLINE_S,
    Cell,
    NotYet,
    Processes,
    Service,
    read_places,
    restore,
)
from benchmarks.scale.job import Peers as LeadersPeers
from benchmarks.scale.model import RUN_ID, SAVE
from emergency_ckpt.cluster.peers import Known, Peers, agree_start
from emergency_ckpt.cluster.start_agreement import agree_settings
from emergency_ckpt.config.settings import Config
from emergency_ckpt.private_names import private_module
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


class _Client:
    """A client of JAX's that counts its calls. While the others speak, none of them waits."""

    def __init__(self, service: Service, client: Any) -> None:
        self._service, self._client = service, client
        self._lock = threading.Lock()
        self._said: set[str] = set()
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
        if self._service.is_speaking:
            raise NotYet(key)
        return self._count().blocking_key_value_get_bytes(key, timeout_ms)

    def key_value_try_get_bytes(self, key: str) -> bytes:
        return self._count().key_value_try_get_bytes(key)

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        return self._count().key_value_dir_get_bytes(prefix)

    def key_value_delete(self, prefix: str) -> None:
        self._count().key_value_delete(prefix)


class _JaxService(Service):
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
        self._connections = [_jax.get_distributed_runtime_client(address, node) for node in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.connect(), self._connections))
        self._leader, self._others = (_Client(self, client) for client in self._connections)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def client(self, process: int) -> _Client:
        return self._others if process else self._leader

    def calls(self) -> tuple[int, int]:
        return self._leader.calls, self._others.calls

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.shutdown(), self._connections))
        self._process.kill()
        self._process.wait()


def start(processes: Processes) -> None:
    """Run the rounds of a start."""
    settings = Config(run_id=RUN_ID, local_dir="none").shared_settings()
    processes.hold(
        "settings",
        lambda me: agree_settings(processes.coordinator("", me), settings, DEADLINE_S),
    )

    def known(me: int) -> tuple[str, Known]:
        return f"10.{me >> 16 & 255}.{me >> 8 & 255}.{me & 255}:40123", Known(5, SAVE.step, SAVE)

    def hello(me: int) -> None:
        agree_start(processes.coordinators[me], lambda: known(me), DEADLINE_S)

    def addresses(me: int) -> None:
        peers = Peers(processes.coordinators[me], None)  # type: ignore[arg-type]  # it sends nothing
        for peer in neighbours(me, processes.count):
            peers.address_of(peer)

    processes.hold("hello", hello)
    processes.hold("addresses", addresses)
    processes.run_on_all("opened", "opened")


def measure(directory: Path, cell: Cell) -> dict[str, Any]:
    """Return the parts of one start and one restore."""
    places, digests = read_places(directory)
    service = _JaxService()
    processes = Processes(service, cell.shape.process_count, _AT_ONCE)
    start(processes)
    leader = restore(processes, cell, digests, LeadersPeers(directory, places))
    service.close()
    return {
        "processes": processes.count,
        "parts": {name: dataclasses.asdict(part) for name, part in processes.parts.items()},
        "inventories_s": leader.taken_s,
        "plan_s": leader.planned_s,
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Cell(**json.loads(sys.argv[2])))))
