"""JAX without its accelerators: a drain or an export runs beside a job, or where none is left."""

from __future__ import annotations

import jax


def use_none() -> None:
    """Let JAX initialise its CPU backend alone. Before any other use of it in this process."""
    jax.config.update("jax_platforms", "cpu")
