"""``host:port`` and ``holder@host:port`` texts, which a holder reports and a client connects to."""

from __future__ import annotations

import re

from emergency_ckpt.core.limits import MAX_ADDRESS_CHARS
from emergency_ckpt.errors import TransferError

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
    ):
        raise TransferError(
            "parse address",
            repr(text[:MAX_ADDRESS_CHARS]),
            "not an address",
            expected="host:port or [IPv6 address]:port",
            actual=repr(text[:MAX_ADDRESS_CHARS]),
        )
    return host, port


def format_address(host: str, port: int) -> str:
    """Return the text from which ``parse_address`` gets ``host`` and ``port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
