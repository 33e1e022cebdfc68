"""Decoding of messages between processes in the coordination service."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from emergency_ckpt.errors import CoordinationError

_T = TypeVar("_T")


def decode_message(data: bytes, kind: type[_T] | Any, name: str) -> _T:
    """The message ``name``. CoordinationError, whatever is wrong with it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CoordinationError(
            "decode",
            f"message {name!r}",
            f"not such a message: {error!s:.300}",
            hint="all processes must run the same version",
        ) from error
