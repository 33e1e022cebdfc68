"""Multi-tier emergency checkpointing for JAX training on many slices."""
