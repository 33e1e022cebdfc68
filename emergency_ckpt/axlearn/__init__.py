"""``EmergencyCheckpointer`` for axlearn's trainer: both tiers behind its ``BaseCheckpointer``."""

from emergency_ckpt.axlearn.checkpointer import EmergencyCheckpointer

__all__ = ["EmergencyCheckpointer"]
