"""Multi-tier emergency checkpointing for JAX training on many slices."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.checkpointer import CheckpointerConfig, EmergencyCheckpointer
    from emergency_ckpt.events import Event
    from emergency_ckpt.restore.request import RestoreReport

    __version__: str

__all__ = [
    "CheckpointerConfig",
    "EmergencyCheckpointer",
    "Event",
    "RestoreReport",
    "__version__",
]

_find = face_of(
    __name__,
    {
        "CheckpointerConfig": "checkpointer",
        "EmergencyCheckpointer": "checkpointer",
        "Event": "events",
        "RestoreReport": "restore.request",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    return metadata.version("emergency-ckpt") if name == "__version__" else _find(name)
