"""The rounds of a start and of a restore, over a real coordination service.

JAX's service runs in a process of its own. All processes of the job run the product's code over
clients of JAX in this one (see ``job``).
"""

import dataclasses
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.scale.job import DEADLINE_S, Cell, Processes, Stored, restore
from benchmarks.scale.model import RUN_ID, SAVE
from emergency_ckpt.cluster.membership import agree_settings
from emergency_ckpt.cluster.peers import Known, Peers, agree_start
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


class _JaxService:
    """JAX's service in a process of its own, and a connection of the leader and of the others."""

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

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def connection(self, process: int) -> Any:
        return self._connections[min(process, 1)]

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
    processes.run_on_all("claimed", "claimed")


def measure(cell: Cell, stored: Stored) -> dict[str, Any]:
    """Return the parts of one start and one restore."""
    service = _JaxService()
    processes = Processes(service, cell.process_count, _AT_ONCE)
    start(processes)
    leader = restore(processes, cell, stored)
    service.close()
    return {
        "processes": processes.count,
        "parts": {name: dataclasses.asdict(part) for name, part in processes.parts.items()},
        "inventories_s": leader.taken_s,
        "plan_s": leader.planned_s,
    }
