"""``host:port`` and ``holder@host:port`` texts: what a holder reports and a client connects to."""

from __future__ import annotations

import re

from emergency_ckpt.errors import TransferError

_MAX_ADDRESS_CHARS = 300  # a DNS name has at most 253
_HOLDER = re.compile(r"[0-9a-f]{32}")


def split_holder(text: str) -> tuple[str, str]:
    """The identity of the server that is wanted, empty where none is named, and the address.

    ``"5f..e0@10.0.0.3:80"`` is what a server tells its peers: who finds another server at the
    address, because the port was given to it since, is told so. What is no identity stays in the
    address, which ``parse_address`` then refuses.
    """
    holder, at, address = text.partition("@")
    return (holder, address) if at and _HOLDER.fullmatch(holder) else ("", text)


def parse_address(text: str) -> tuple[str, int]:
    """``"10.0.0.3:80"``, ``"name:80"`` or ``"[::1]:80"`` as (host, port).

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
        or len(text) > _MAX_ADDRESS_CHARS
        or any(c.isspace() or c in "[]/@" or not c.isprintable() for c in host)
    ):
        raise TransferError(
            "parse address",
            repr(text[:_MAX_ADDRESS_CHARS]),
            "not an address",
            expected="host:port or [IPv6 address]:port",
            actual=repr(text[:_MAX_ADDRESS_CHARS]),
        )
    return host, port


def format_address(host: str, port: int) -> str:
    """The text that ``parse_address`` takes apart again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
