"""The run's secret, and how both sides prove that they know it before anything else is said."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from emergency_ckpt.errors import AuthenticationFailed, ConfigError, ProtocolViolation
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.stream import Stream, Timeout

SECRET_VARIABLE = "ECKPT_SECRET"  # noqa: S105  the name of a variable, not a secret
MIN_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 4096
T = TypeVar("T")
_GENERATE_HINT = "python -c 'import secrets; print(secrets.token_hex(32))' makes one"


def generate_secret() -> bytes:
    """A fresh secret: 32 random bytes as 64 hexadecimal digits, fit for a file or a variable."""
    return secrets.token_hex(32).encode()


def load_secret_file(path: Path) -> bytes:
    """The secret in ``path``, without surrounding white space.

    ConfigError when the file cannot be read, is too short or too long, or is open to others. Group
    read is allowed, because mounted Kubernetes secrets with an fsGroup always have it.
    """
    # O_NONBLOCK: a pipe or a device must not wait for its other end; O_NOCTTY: nor become ours.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
        try:
            mode = os.fstat(descriptor).st_mode
            is_file = stat.S_ISREG(mode)
            data = os.read(descriptor, _MAX_SECRET_BYTES + 1) if is_file else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise ConfigError([f"{path} cannot be read: {error}"], target="secret file") from error
    if not is_file:
        raise ConfigError([f"{path} is {_kind_of(mode)}, not a regular file"], target="secret file")
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigError(
            [f"{path} is open to others (mode {mode & 0o777:03o}): chmod 600 it"],
            target="secret file",
        )
    return _checked(data, f"the secret file {path}")


def secret_from_environment(environ: Mapping[str, str]) -> bytes | None:
    """The secret in ``ECKPT_SECRET``, None when that is not set. ConfigError when too short.

    Its bytes are those of the environment, whatever encoding they are in.
    """
    text = environ.get(SECRET_VARIABLE)
    if text is None:
        return None
    try:
        secret = os.fsencode(text)
    except UnicodeEncodeError as error:  # a mapping that is not the process's environment
        problem = f"{SECRET_VARIABLE} has characters that no environment can have"
        raise ConfigError([problem], target="secret") from error
    return _checked(secret, SECRET_VARIABLE)


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def check_secret(secret: bytes) -> None:
    """ConfigError when ``secret`` is too short: a recorded handshake could be searched offline."""
    _checked(secret, "the secret")


def _checked(data: bytes, where: str) -> bytes:
    # Of what is too long only a part was read, which may shrink to a length that would do.
    secret = data.strip() if len(data) <= _MAX_SECRET_BYTES else data
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigError(
            [
                f"{where} holds {len(secret)} bytes, needed are"
                f" {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}; {_GENERATE_HINT}"
            ],
            target="secret",
        )
    return secret


class Credentials:
    """A run id and its secret. Never shows the secret in its text form."""

    def __init__(self, run_id: str, secret: bytes) -> None:
        check_secret(secret)
        self.run_id = run_id
        self._secret = secret

    def mac(self, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        """HMAC-SHA256 over protocol, version, role, run and both nonces.

        Each field is preceded by its length, so that no two inputs look alike; the role keeps a
        proof from being reflected.
        """
        fields = (
            b"emergency_ckpt transfer",
            str(wire.PROTOCOL_VERSION).encode(),
            role,
            self.run_id.encode(),
            client_nonce,
            server_nonce,
        )
        message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        return hmac.new(self._secret, message, hashlib.sha256).digest()


class Refused(Exception):
    """The server answered with a Failure; the client gives it its meaning."""

    def __init__(self, failure: wire.Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def prove_to_server(stream: Stream, credentials: Credentials, timeout: Timeout) -> None:
    """The client's side. Sends nothing but a nonce before the server has proved itself.

    Raises AuthenticationFailed, ProtocolViolation, or Refused when the server says no;
    TimeoutError and ConnectionError from the network.
    """
    client_nonce = secrets.token_bytes(wire.NONCE_BYTES)
    hello = wire.Hello(protocol=wire.PROTOCOL_VERSION, client_nonce=client_nonce)
    stream.send_frame(hello, timeout())
    proof = _receive(stream, wire.SERVER_PROOF, timeout)
    if isinstance(proof, wire.Failure):
        raise Refused(proof)
    expected = credentials.mac(b"server", client_nonce, proof.server_nonce)
    if not hmac.compare_digest(expected, proof.mac):
        raise AuthenticationFailed(
            "authenticate",
            stream.peer,
            "the server does not know the secret of this run",
            hint="another run may listen at that address; check run id and secret on both sides",
        )
    mac = credentials.mac(b"client", client_nonce, proof.server_nonce)
    stream.send_frame(wire.ClientProof(mac=mac), timeout())
    welcome = _receive(stream, wire.WELCOME, timeout)
    if isinstance(welcome, wire.Failure):
        raise Refused(welcome)


def authenticate_client(stream: Stream, credentials: Credentials, timeout: Timeout) -> None:
    """The server's side. Raises AuthenticationFailed or ProtocolViolation; serves nothing."""
    hello = _receive(stream, wire.HELLO, timeout)
    if hello.protocol != wire.PROTOCOL_VERSION:
        raise ProtocolViolation(
            "authenticate",
            stream.peer,
            "another protocol version",
            expected=wire.PROTOCOL_VERSION,
            actual=hello.protocol,
        )
    server_nonce = secrets.token_bytes(wire.NONCE_BYTES)
    mac = credentials.mac(b"server", hello.client_nonce, server_nonce)
    stream.send_frame(wire.ServerProof(server_nonce=server_nonce, mac=mac), timeout())
    proof = _receive(stream, wire.CLIENT_PROOF, timeout)
    expected = credentials.mac(b"client", hello.client_nonce, server_nonce)
    if not hmac.compare_digest(expected, proof.mac):
        raise AuthenticationFailed(
            "authenticate", stream.peer, "the client does not know the secret of this run"
        )
    stream.send_frame(wire.Welcome(), timeout())


def _receive(stream: Stream, decoder: msgspec.json.Decoder[T], timeout: Timeout) -> T:
    # Before the proof a peer may send little: it could be anybody.
    return stream.receive_frame(decoder, timeout(), limit_bytes=wire.MAX_HANDSHAKE_FRAME_BYTES)
