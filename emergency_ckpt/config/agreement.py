"""The settings that must be equal on all processes of a job, as texts that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from emergency_ckpt.config.policies import policy_identity

MAY_DIFFER = frozenset(
    {
        "async_save",
        "bind_host",
        "bind_port",
        "copy_batch_bytes",
        "copy_threads",
        "device_copy_bytes",
        "local_dir",
        "on_event",
        "other_runs_grace_s",
        "persistent_timeout_s",
        "preemption_grace_s",
        "ramdisk_wait_s",
        "restore_timeout_s",
        "save_niceness",
        "save_timeout_s",
        "secret_file",
        "snapshot_mode",
        "staging_bytes",
        "staging_memory",
        "start_timeout_s",
        "exit_timeout_s",
        "storage_buffer_bytes",
        "storage_wait_timeout_s",
        "transfer_streams",
        "transfer_timeout_s",
    }
)
"""Settings that are a process's own affair. All others must be equal, also those added later."""

_LONGEST_TEXT_CHARS = 200


def shared_settings(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the text of each setting that must agree: equal texts, equal settings."""
    return {
        name: _bounded(_identity(value))
        for name, value in sorted(settings.items())
        if name not in MAY_DIFFER
    }


def _identity(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, jax.sharding.Mesh):
        devices = [device.id for device in value.devices.flat]
        return f"axes {value.axis_names} of {value.devices.shape}, devices {devices}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_identity(part) for part in value)})"
    if callable(value):
        return "a function"  # its name may change where nothing else does
    return repr(policy_identity(value))


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST_TEXT_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]
    return f"{text[:_LONGEST_TEXT_CHARS]}... ({digest})"
