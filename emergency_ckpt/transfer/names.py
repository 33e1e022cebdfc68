"""The addresses behind a name."""

from __future__ import annotations

import socket

from emergency_ckpt.core.address import format_address, parse_address, split_holder


def each_address(address: str) -> list[str]:
    """Return the addresses that a name stands for, sorted; one that does not resolve as it is.

    The name of a headless service stands for a server at each of its addresses. Blocks for the
    resolver. TransferError when it is no address.
    """
    if split_holder(address)[0]:
        return [address]
    found = numeric_addresses(address)
    return found if len(found) > 1 else [address]  # the call to it names an error of the name


def numeric_addresses(address: str) -> list[str]:
    """Return the addresses of a name as numbers, sorted; none where it does not resolve.

    Blocks for the resolver. TransferError when it is no address.
    """
    host, port = parse_address(split_holder(address)[1])
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({format_address(str(place[0]), port) for _, _, _, _, place in entries})
