"""A checkpointer whose bytes pass through small or other buffers than this machine's."""

from __future__ import annotations

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import Buffers


def with_buffers(buffers: Buffers, *, stores_newest: bool = True) -> type[EmergencyCheckpointer]:
    """Return a class of checkpointers with ``buffers``.

    ``stores_newest``: a good end brings RAM's newest step to storage, as it does without a class.
    """
    parts = {"_buffers": buffers, "_stores_newest": stores_newest}
    return type("EmergencyCheckpointer", (EmergencyCheckpointer,), parts)
