"""``EmergencyCheckpointer`` for axlearn's trainer: both tiers behind its ``BaseCheckpointer``."""

from emergency_ckpt.axlearn.adapter import EmergencyCheckpointer

__all__ = ["EmergencyCheckpointer"]
