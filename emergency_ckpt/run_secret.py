"""The run's secret: where it comes from, and what is derived from it."""

from __future__ import annotations

import dataclasses
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.types import Security

SECRET_VARIABLE = "ECKPT_SECRET"  # noqa: S105  the name of a variable, not a secret
LAUNCHER_VARIABLE = "ECKPT_JOB_SECRET"
"""A secret that `eckpt launch` makes for the processes that it starts."""
MIN_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 4096
_GENERATE_HINT = "python -c 'import secrets; print(secrets.token_hex(32))' makes one"


Kind = Literal["given", "launcher"]
"""From the user, or from the launcher of the job, which has started all processes."""


@dataclasses.dataclass(frozen=True)
class OwnSecret:
    """A secret that this process has before it talks to others."""

    value: bytes = dataclasses.field(repr=False)
    kind: Kind


def generate_secret() -> bytes:
    """Return a fresh secret: 32 random bytes as 64 hexadecimal digits, fit for a file or a
    variable.
    """
    return secrets.token_hex(32).encode()


def load_secret_file(path: Path) -> bytes:
    """Return the secret in ``path``, without surrounding white space.

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
    """Return the secret in ``ECKPT_SECRET``, None when that is not set. ConfigError when too short.

    Its bytes are those of the environment, whatever encoding they are in.
    """
    return _from_variable(SECRET_VARIABLE, environ)


def launcher_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that the launcher of this job made for it, None when there is no such
    launcher.

    Nobody else knows it, but the next job has another one. ConfigError when it is too short.
    """
    return _from_variable(LAUNCHER_VARIABLE, environ)


def own_secret(secret_file: str | None, environ: Mapping[str, str]) -> OwnSecret | None:
    """Return the secret that this process is given; None when it is given none.

    Of ``secret_file``, else of the user's variable, else of the launcher of the job. ConfigError
    when there is one that will not do.
    """
    if secret_file:
        return OwnSecret(load_secret_file(Path(secret_file)), "given")
    given = secret_from_environment(environ)
    if given is not None:
        return OwnSecret(given, "given")
    launched = launcher_secret(environ)
    return None if launched is None else OwnSecret(launched, "launcher")


def _from_variable(name: str, environ: Mapping[str, str]) -> bytes | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        secret = os.fsencode(text)
    except UnicodeEncodeError as error:  # a mapping that is not the process's environment
        problem = f"{name} has characters that no environment can have"
        raise ConfigError([problem], target="secret") from error
    return _checked(secret, name)


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
    """A run id, its secret, and how bytes are protected. Never shows the secret as text."""

    def __init__(self, run_id: str, secret: bytes, security: Security = "mac") -> None:
        check_secret(secret)
        self.run_id = run_id
        self.security: Security = security
        self._secret = secret

    def derive(self, derivation: HKDF) -> bytes:
        """Key material from the secret."""
        return derivation.derive(self._secret)
