"""Votes over a real coordination service in a process of its own; prints how that one grows.

    python service_memory_program.py VOTES

Prints the bytes that the service's process has allocated and not freed: after a tenth of the
votes, after all, and after as many barriers again as votes came between, each of a name of its
own. Its resident memory would not do: it also grows by pages that hold nothing yet.
"""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from jax._src.lib import _jax

from emergency_ckpt.cluster.coordination import JaxCoordinator, namespace
from emergency_ckpt.save import Ballot, Vote
from emergency_ckpt.types import SaveId

COUNT = 2
SERVICE = """
import ctypes
import sys
from jax._src.lib import _jax

class Mallinfo(ctypes.Structure):  # of malloc.h, the same in every glibc
    _fields_ = [(f"field_{i}", ctypes.c_int) for i in range(7)] + [
        ("uordblks", ctypes.c_uint), ("fordblks", ctypes.c_int), ("keepcost", ctypes.c_int)]

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo
service = _jax.get_distributed_runtime_service(sys.argv[1], int(sys.argv[2]))
print("up", flush=True)
for _ in sys.stdin:
    print(mallinfo().uordblks, flush=True)
"""


def allocated_bytes(service: "subprocess.Popen[bytes]") -> int:
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(b"\n")
    service.stdin.flush()
    return int(service.stdout.readline())


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
            Vote(JaxCoordinator(client, namespace("run".ljust(16, "0")), i, COUNT), 60.0)
            for i, client in enumerate(clients)
        ]
        sizes = list[int]()
        for step in range(1, votes + 1):
            save, ballot = SaveId(step, "life", "run"), Ballot(b"0123456789abcdef" * 2, b"of eight")
            outcomes = pool.map(lambda vote, s=save, b=ballot: vote.cast(s, b), casting)
            assert {outcome.kind for outcome in outcomes} == {"complete"}
            if step in (votes // 10, votes):
                sizes.append(allocated_bytes(service))
        for number in range(votes - votes // 10):
            list(pool.map(lambda c, n=number: c.wait_at_barrier(f"own/{n}", 60_000, None), clients))
        sizes.append(allocated_bytes(service))
        list(pool.map(lambda client: client.shutdown(), clients))
    service.kill()
    print(*sizes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
