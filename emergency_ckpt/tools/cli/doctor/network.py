"""Checks of the secret and of the peers' addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from emergency_ckpt.core.address import format_address, parse_address, split_holder
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.run_secret import SECRET_VARIABLE, OwnSecret, own_secret
from emergency_ckpt.tools.cli.doctor.findings import Finding
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.pool import UnprovedPeer

_AT_ONCE = 16


def check_secret(
    secret_file: str | None, environ: Mapping[str, str]
) -> tuple[Finding, OwnSecret | None]:
    """Return the finding about the run's secret, and the secret when it can be used."""
    try:
        secret = own_secret(secret_file, environ)
    except ConfigError as error:
        mend = "chmod 600 it; a secret has 32 to 4096 bytes (see docs/security.md)."
        return Finding("secret", "failure", "; ".join(error.problems), mend), None
    source = f"file {secret_file}" if secret_file else SECRET_VARIABLE
    if secret is not None and secret.kind == "given":
        return Finding("secret", "ok", f"{len(secret.value)} bytes from {source}"), secret
    text = "no secret is given: the processes make one up at each start, and no step is signed"
    mend = f"Set secret_file or {SECRET_VARIABLE}; see docs/security.md."
    return Finding("secret", "warning", text, mend), secret


def check_bind(bind_host: str, port: int) -> Finding:
    """Return whether this host can serve its shards at an address. Takes the port for a moment."""
    address = format_address(bind_host, port)
    try:
        family = socket.getaddrinfo(bind_host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((bind_host, port))
    except OSError as error:
        mend = "Give an address of this host as bind_host, and a port that no program has."
        return Finding("bind", "failure", f"cannot listen on {address}: {error}", mend)
    return Finding("bind", "ok", f"can listen on {address}")


def check_peers(
    peers: Sequence[str],
    bind_host: str | None,
    run_id: str | None,
    secret: OwnSecret | None,
    timeout_s: float,
) -> list[Finding]:
    """Return a finding for each peer: reached, and with a run id and a secret also greeted.

    Blocks for at most ``timeout_s`` seconds for each 16 peers.
    """
    client = None
    if run_id is not None and secret is not None:
        client = TransferClient(run_id=run_id, secret=secret.value, connect_timeout_s=timeout_s)
    with contextlib.ExitStack() as stack:
        if client is not None:
            stack.enter_context(client)
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE, "eckpt-peers"))
        looks = [pool.submit(_peer, peer, bind_host, client, timeout_s) for peer in peers]
        return [look.result() for look in looks]


def _peer(
    peer: str, bind_host: str | None, client: TransferClient | None, timeout_s: float
) -> Finding:
    try:
        own = _own_address(split_holder(peer)[1], timeout_s)
        if client is not None:
            client.greet(peer, timeout_s)
    except (CheckpointError, OSError) as error:
        problem = error.problem if isinstance(error, CheckpointError) else str(error)
        mend = "Start its server ('eckpt serve'), and let its port through firewalls and policies."
        if isinstance(error, UnprovedPeer):
            mend = "Give both sides the same secret and the same --run-id."
        return Finding("peer", "failure", f"{peer} cannot be reached: {problem}", mend)
    if bind_host is not None and _is_loopback(bind_host) and not _is_loopback(own):
        text = f"{peer} is on another host, which cannot reach this one at {bind_host}"
        return Finding("peer", "failure", text, f"Set bind_host to {own}.")
    said = "reached and greeted" if client is not None else "reached; not greeted (no secret)"
    return Finding("peer", "ok", f"{peer} {said}; it sees this host as {own}")


def _own_address(peer: str, timeout_s: float) -> str:
    """Return the address of this host towards ``peer``, by a connection that is closed at once."""
    with socket.create_connection(parse_address(peer), timeout_s) as connection:
        return str(connection.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
