"""The settings that must be equal on all processes of a job, as texts that can be compared."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any, cast

import jax

from emergency_ckpt.config.policies import policy_identity
from emergency_ckpt.config.table import settings_table

_SHOWN_CHARS = 200


def shared_settings(config: object) -> dict[str, str]:
    """Return the text of each setting that must agree; equal texts are equal settings."""
    rows = sorted(settings_table(type(config)), key=lambda row: row.name)
    return {
        row.name: _bounded(_identity(getattr(config, row.name)))
        for row in rows
        if not row.may_differ
    }


def _identity(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | datetime.timedelta):
        return repr(value)
    if isinstance(value, jax.sharding.Mesh):
        devices = [device.id for device in value.devices.flat]
        return f"axes {value.axis_names} of {value.devices.shape}, devices {devices}"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_identity, cast('frozenset[object]', value))))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_identity(part) for part in value)})"
    if callable(value):
        return "a function"  # its name may change where nothing else does
    return repr(policy_identity(value))


def _bounded(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]
    return f"{text[:_SHOWN_CHARS]}... ({digest})"
