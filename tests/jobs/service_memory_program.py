"""Votes over a real coordination service in a process of its own; prints how that one grows.

    python service_memory_program.py VOTES

Prints the bytes of the service's process after a tenth of the votes, and after all.
"""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax._src.lib import _jax

from emergency_ckpt.cluster.coordination import JaxCoordinator, namespace
from emergency_ckpt.save.vote import Ballot, Vote
from emergency_ckpt.types import SaveId

COUNT = 2
PAGE_BYTES = 4096
SERVICE = """
import sys
from jax._src.lib import _jax
service = _jax.get_distributed_runtime_service(sys.argv[1], int(sys.argv[2]))
print("up", flush=True)
sys.stdin.read()
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def main(votes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, address, str(COUNT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert service.stdout is not None
    assert service.stdout.readline() == b"up\n"
    clients = [_jax.get_distributed_runtime_client(address, i) for i in range(COUNT)]
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        casting = [
            Vote(JaxCoordinator(client, namespace("run", 0), i, COUNT), 60.0)
            for i, client in enumerate(clients)
        ]
        sizes = list[int]()
        for step in range(1, votes + 1):
            save, ballot = SaveId(step, "life", "run"), Ballot("0123456789abcdef" * 2, "layout")
            outcomes = pool.map(lambda vote, s=save, b=ballot: vote.cast(s, b), casting)
            assert {outcome.kind for outcome in outcomes} == {"complete"}
            if step in (votes // 10, votes):
                sizes.append(resident_bytes(service.pid))
        list(pool.map(lambda client: client.shutdown(), clients))
    service.kill()
    print(*sizes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
