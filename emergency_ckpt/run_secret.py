"""The run's secret: its sources, and the keys derived from it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emergency_ckpt.core.limits import MAX_SECRET_BYTES, MIN_SECRET_BYTES
from emergency_ckpt.errors import ConfigError

SECRET_VARIABLE = "ECKPT_SECRET"  # noqa: S105  the name of a variable, not a secret
LAUNCHER_VARIABLE = "ECKPT_JOB_SECRET"
"""Variable with the secret that ``eckpt launch`` generates for the processes that it starts.

No other party knows that secret, but the next job has another one."""
_GENERATE_HINT = "python -c 'import secrets; print(secrets.token_hex(32))' makes one"

Kind = Literal["given", "launcher"]
"""Source: the user, or the launcher that has started all processes of the job."""


@dataclasses.dataclass(frozen=True)
class OwnSecret:
    """A secret that this process has before it communicates with others."""

    value: bytes = dataclasses.field(repr=False)
    kind: Kind


def generate_secret() -> bytes:
    """Return a fresh secret: 32 random bytes as 64 hexadecimal digits."""
    return secrets.token_hex(32).encode()


def load_secret_file(path: Path) -> bytes:
    """Return the secret in ``path``: text without surrounding white space, other bytes as they are.

    ConfigError when the file cannot be read, is too short, too long or easy to guess, belongs to
    another user than this one or root, or is open to others. Group read is allowed, because mounted
    Kubernetes secrets with an fsGroup always have it.
    """
    # O_NONBLOCK: opening a pipe or a device must not block; O_NOCTTY: a terminal must not become
    # ours.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            mode = status.st_mode
            is_file = stat.S_ISREG(mode)
            data = os.read(descriptor, MAX_SECRET_BYTES + 1) if is_file else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise ConfigError([f"{path} cannot be read: {error}"], target="secret file") from error
    if not is_file:
        raise ConfigError([f"{path} is {_kind_of(mode)}, not a regular file"], target="secret file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            [f"{path} belongs to user {status.st_uid}, who knows it and can change it: chown it"],
            target="secret file",
        )
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigError(
            [f"{path} is open to others (mode {mode & 0o777:03o}): chmod 600 it"],
            target="secret file",
        )
    return _given(data, f"the secret file {path}")


def secret_from_environment(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret in ``ECKPT_SECRET``, None when that is not set.

    ConfigError when it is too short, too long or easy to guess. Its bytes are those of the
    environment, in any encoding.
    """
    return _from_variable(SECRET_VARIABLE, environ)


def secret_for_tools(path: Path | None) -> bytes | None:
    """Return the secret in ``path``, else in ``ECKPT_SECRET``; None without both. ConfigError."""
    return secret_from_environment(os.environ) if path is None else load_secret_file(path)


def own_secret(secret_file: str | None, environ: Mapping[str, str]) -> OwnSecret | None:
    """Return the secret given to this process; None when it is given none.

    From ``secret_file``, else the user's variable, else the job's launcher. ConfigError when it is
    invalid.
    """
    if secret_file:
        return OwnSecret(load_secret_file(Path(secret_file)), "given")
    given = secret_from_environment(environ)
    if given is not None:
        return OwnSecret(given, "given")
    launched = _from_variable(LAUNCHER_VARIABLE, environ)
    return None if launched is None else OwnSecret(launched, "launcher")


def _from_variable(name: str, environ: Mapping[str, str]) -> bytes | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        secret = os.fsencode(text)
    except UnicodeEncodeError as error:  # only in a mapping that is not the process's environment
        problem = f"{name} has characters that an environment cannot have"
        raise ConfigError([problem], target="secret") from error
    return _given(secret, name)


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def check_secret(secret: bytes, name: str = "the secret") -> None:
    """Raise ConfigError for a short secret: a recorded handshake could be searched offline."""
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            [
                f"{name} has {len(secret)} bytes, not"
                f" {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}; {_GENERATE_HINT}"
            ],
            target="secret",
        )


def _given(data: bytes, where: str) -> bytes:
    # A secret that is too long was read only in part, and stripping could hide that.
    secret = data.strip() if _is_text(data) and len(data) <= MAX_SECRET_BYTES else data
    check_secret(secret, where)
    # 16 random bytes in any notation have 36 at the least; what repeats itself has less.
    if len(zlib.compress(secret, 9)) < MIN_SECRET_BYTES:
        problem = f"{where} can be guessed, because it repeats itself; {_GENERATE_HINT}"
        raise ConfigError([problem], target="secret")
    return secret


def _is_text(data: bytes) -> bool:
    try:
        return data.decode().strip().isprintable()
    except UnicodeDecodeError:
        return False


@functools.lru_cache(maxsize=8)
def stretched(run_id: str, secret: bytes) -> bytes:
    """Return 32 bytes that stand for ``secret`` in the run; takes some 40 ms and 16 MiB once.

    A guess at a weak secret costs as much. Every secret is stretched, since no word list has all
    weak secrets.
    """
    salt = f"emergency_ckpt {run_id}".encode()
    return hashlib.scrypt(secret, salt=salt, n=1 << 14, r=8, p=1, dklen=32)


class Credentials:
    """A run id and its secret. Its repr never shows the secret."""

    def __init__(self, run_id: str, secret: bytes) -> None:
        check_secret(secret)
        self.run_id = run_id
        self._secret = stretched(run_id, secret)

    def derive(self, derivation: HKDF, joint: bytes) -> bytes:
        """Return key material derived from ``joint``, of a fixed length, and the secret."""
        return derivation.derive(joint + self._secret)
