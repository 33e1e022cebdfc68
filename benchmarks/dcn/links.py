"""Hosts as network namespaces, each with a rate-limited link to one switch."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_PROGRAMS = ("ip", "tc", "unshare")
_COMMAND_TIMEOUT_S = 30.0
# Segments leave a virtual link in pieces of up to 64 KiB, which a smaller bucket would never pass.
_BURST = "256kb"
_QUEUE = "50ms"


class NotPossible(Exception):
    """Such hosts are not possible on this machine or for this user. The message names the cause."""


@dataclass(frozen=True)
class Links:
    """The network namespaces and addresses of the hosts of an existing network, by number."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]


@contextlib.contextmanager
def linked_hosts(count: int, rate_mbit: float, slowest: float = 1.0) -> Iterator[Links]:
    """Create ``count`` hosts on one switch; each direction of each link has ``rate_mbit``.

    The last host's link has that rate times ``slowest``.

    Removes all of them at the end, also after a failed start. Raises NotPossible.
    """
    require_means()
    prefix = f"eckpt-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = tuple(f"{prefix}-{number}" for number in range(count))
    addresses = tuple(address(number) for number in range(count))
    with contextlib.ExitStack() as stack:
        for namespace in (switch, *hosts):
            _run("ip", "netns", "add", namespace)
            stack.callback(_run, "ip", "netns", "del", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            ends = ("type", "veth", "peer", "name", "uplink", "netns", host)
            _run("ip", "-n", switch, "link", "add", port, *ends)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{addresses[number]}/16", "dev", "uplink")
            _run("ip", "-n", host, "link", "set", "uplink", "up")
            rate = f"{rate_mbit * (slowest if number == count - 1 else 1.0):g}mbit"
            limit = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
            for namespace, device in ((switch, port), (host, "uplink")):
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)
        yield Links(hosts, addresses)


def address(number: int) -> str:
    """Return the address of a host by its number, from 0 to 65,000."""
    return f"10.77.{(number + 1) // 256}.{(number + 1) % 256}"


def require_means() -> None:
    """Raise NotPossible without root or a needed program. Changes nothing."""
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise NotPossible(f"not installed: {', '.join(missing)} (iproute2, util-linux)")


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")
