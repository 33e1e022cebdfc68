"""Decoding of messages between processes in the coordination service.

Any value there may be damaged, of another version, or forged. A value that cannot be decoded is a
CoordinationError that names the message and its process. A collective call treats it as a failure
of that process, so that all processes see it (``decode_each``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES, MAX_PLAN_MESSAGE_BYTES, MAX_REASON_BYTES
from emergency_ckpt.errors import CoordinationError

_T = TypeVar("_T")
_UNREADABLE_LIMIT_CHARS = 400
_HINT = "all processes must run the same version"


def decode_message(
    data: bytes, kind: type[_T] | Any, name: str, *, limit_bytes: int = MAX_PLAN_MESSAGE_BYTES
) -> _T:
    """Return the message ``name``. CoordinationError for anything else."""
    if len(data) > limit_bytes:
        raise _not_a_message(name, f"{len(data)} bytes are more than {limit_bytes}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_a_message(name, f"{error!s:.300}") from error


def decode_each(
    found: Mapping[int, bytes],
    kind: type[_T],
    name: str,
    unreadable: Callable[[str], _T],
    *,
    limit_bytes: int = MAX_MESSAGE_BYTES,
) -> dict[int, _T]:
    """Return the message ``name`` of each process; never raises.

    ``unreadable``: makes the message that replaces an undecodable one, from the reason.
    """
    messages: dict[int, _T] = {}
    for process, data in found.items():
        try:
            messages[process] = decode_message(
                data, kind, f"{name}/{process}", limit_bytes=limit_bytes
            )
        except CoordinationError as error:
            messages[process] = unreadable(str(error)[:_UNREADABLE_LIMIT_CHARS])
    return messages


def by_process(found: Mapping[str, bytes], name: str, process_count: int) -> dict[int, bytes]:
    """Return the values below the key ``name`` by process. CoordinationError: unknown process."""
    return {process_of(text, name, process_count): data for text, data in found.items()}


def process_of(text: str, name: str, process_count: int) -> int:
    """Return the process that the last part of a key below ``name`` names. CoordinationError."""
    process = number_of(text, name)
    if process >= process_count:
        raise _not_a_message(f"{name}/{text[:40]}", f"there are {process_count} processes")
    return process


def number_of(text: str | bytes, name: str) -> int:
    """Return a whole number from 0 on, in its shortest decimal form. CoordinationError."""
    plain = text if isinstance(text, str) else text[:40].decode(errors="replace")
    is_number = plain.isascii() and plain.isdecimal() and len(plain) <= 20
    if not is_number or str(int(plain)) != plain:
        raise _not_a_message(name, f"{plain[:40]!r} is no number")
    return int(plain)


def reason_of(data: bytes) -> str:
    """Return the readable part of a sentence for people. Never raises."""
    return data[:MAX_REASON_BYTES].decode(errors="replace")


def _not_a_message(name: str, problem: str) -> CoordinationError:
    return CoordinationError(
        "decode", f"message {name!r}", f"not such a message: {problem}", hint=_HINT
    )
