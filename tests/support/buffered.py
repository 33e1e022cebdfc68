"""A checkpointer whose bytes pass through small or other buffers than this machine's."""

from __future__ import annotations

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import Buffers


def with_buffers(buffers: Buffers) -> type[EmergencyCheckpointer]:
    """Return a class of checkpointers with ``buffers``."""
    return type("EmergencyCheckpointer", (EmergencyCheckpointer,), {"_buffers": buffers})
