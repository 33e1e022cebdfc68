"""Tests that use JAX in this process see eight CPU devices; nothing else may configure it here."""

from __future__ import annotations

import jax

# Before any backend exists; JAX raises otherwise, and then the order of imports is to be mended.
# By configuration and not by environment: processes that tests start choose for themselves.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
