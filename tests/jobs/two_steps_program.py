"""Puts steps 10 and 20 into the bucket ``bucket``."""

from persistent_steps import life, save_over

from emergency_ckpt.storage import PersistentTier

for step in (10, 20):
    save_over(PersistentTier("gs://bucket/run"), step, step, life(1))
