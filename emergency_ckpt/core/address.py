"""``host:port`` and ``holder@host:port`` texts, which a holder reports and a client connects to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from emergency_ckpt.core.limits import MAX_ADDRESS_CHARS
from emergency_ckpt.errors import ConfigError, TransferError

_HOLDER = re.compile(r"[0-9a-f]{32}")


def split_holder(text: str) -> tuple[str, str]:
    """Return the identity of the wanted server, empty where none is named, and the address.

    A server tells its peers ``"5f..e0@10.0.0.3:80"``. If its port was given to another server
    since, the identity lets the client notice. A prefix that is no identity stays in the address,
    and ``parse_address`` refuses it.
    """
    holder, at, address = text.partition("@")
    return (holder, address) if at and _HOLDER.fullmatch(holder) else ("", text)


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) of ``"10.0.0.3:80"``, ``"name:80"`` or ``"[::1]:80"``.

    Raises TransferError for anything else. An IPv6 literal needs its brackets: without them the
    port cannot be told from the last group.
    """
    host, colon, digits = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        well_formed = ":" in host
    else:
        well_formed = ":" not in host
    port = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else 0
    if (
        not (colon and host and well_formed and 1 <= port <= 65535)
        or len(text) > MAX_ADDRESS_CHARS
        or any(c.isspace() or c in "[]/@" or not c.isprintable() for c in host)
        or not _is_encodable(host)
    ):
        raise TransferError(
            "parse address",
            repr(text[:MAX_ADDRESS_CHARS]),
            "not an address",
            expected="host:port or [IPv6 address]:port",
            actual=repr(text[:MAX_ADDRESS_CHARS]),
        )
    return host, port


def _is_encodable(host: str) -> bool:
    try:
        host.encode("idna")  # as the socket module does, whose UnicodeError is no OSError
    except UnicodeError:
        return False
    return True


def format_address(host: str, port: int) -> str:
    """Return the text from which ``parse_address`` gets ``host`` and ``port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


MOST_OUTSIDE_HOSTS = 8
"""One host seldom has as many addresses: of so many, one is another host's where there is one."""


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a numeric address, is reached from its own host alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def outside_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return some of ``hosts`` that a process on a loopback address must reach and be reached from.

    ``hosts``: numeric addresses of all processes. Empty where none of them is a loopback address,
    or all are: a job whose processes all have one is on one machine.
    """
    distinct = set(hosts)
    outside = sorted(host for host in distinct if not is_loopback(host))
    return tuple(outside[:MOST_OUTSIDE_HOSTS]) if len(outside) < len(distinct) else ()


def reachable_host(host: str, outside: Iterable[tuple[str, str]], *, is_given: bool) -> str:
    """Return the address on which a process must serve whose peers are told ``host``.

    A loopback address is replaced by the one of this host that reaches the others. The address of a
    coordinator leads to one where the host's name stands for 127.0.1.1 on the host itself, as on
    Debian.

    Args:
      outside: of ``outside_hosts``: (the host, this host's address on the way to it). Both are
        equal for an address of this very host; the second is empty where no way is known.
      is_given: ``host`` is the setting ``bind_host``, which is not replaced.

    Raises:
      ConfigError: no other address is known, or ``host`` is given and another host has processes.
    """
    routes = list(outside)
    if not routes or not is_loopback(host):
        return host
    away = [(other, own) for other, own in routes if other != own]
    if is_given and not away:
        return host
    # A route that leads nowhere, or over the loopback interface, is taken where there is no other.
    other, own = min(away or routes, key=lambda route: is_loopback(route[1]) or not route[1])
    if is_given or is_loopback(own) or not own:
        problem = f"peers on other hosts, such as {other}, cannot reach {host}, a loopback address"
        cause = "bind_host is set to it" if is_given else "no other address of this host is known"
        mend = "to this host's address on the network that leads to them"
        raise ConfigError(
            [f"transfer address {host!r}: {problem}: {cause}; set bind_host {mend}"],
            target="transfer server",
        )
    return own
