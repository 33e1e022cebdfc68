"""Configs in which a test chooses alone what otherwise follows from ``stall_timeout_s``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emergency_ckpt import CheckpointerConfig

FOLLOWING = (
    "start_timeout_s",
    "save_timeout_s",
    "transfer_timeout_s",
    "storage_wait_timeout_s",
)


def config_with(
    settings: Mapping[str, Any], kind: type[CheckpointerConfig] = CheckpointerConfig
) -> CheckpointerConfig:
    """Return a config with ``settings``, among which may be some of ``FOLLOWING``."""
    chosen = {name: value for name, value in settings.items() if name in FOLLOWING}
    rest = {name: value for name, value in settings.items() if name not in FOLLOWING}
    return type(kind.__name__, (kind,), chosen)().set(**rest)
