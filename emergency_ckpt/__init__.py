"""Multi-tier emergency checkpointing for JAX training on many slices."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emergency_ckpt.checkpointer import CheckpointerConfig, EmergencyCheckpointer
    from emergency_ckpt.core.save.timing import AdaptiveInterval
    from emergency_ckpt.events import Event
    from emergency_ckpt.restore.request import RestoreReport

    __version__: str

__all__ = [
    "AdaptiveInterval",
    "CheckpointerConfig",
    "EmergencyCheckpointer",
    "Event",
    "RestoreReport",
    "__version__",
]

_HOMES = {
    "AdaptiveInterval": "emergency_ckpt.core.save.timing",
    "CheckpointerConfig": "emergency_ckpt.checkpointer",
    "EmergencyCheckpointer": "emergency_ckpt.checkpointer",
    "Event": "emergency_ckpt.events",
    "RestoreReport": "emergency_ckpt.restore.request",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    # On first use: the launcher and the command line import this package without JAX.
    if name == "__version__":
        return metadata.version("emergency-ckpt")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
