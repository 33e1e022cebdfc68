"""These tests need TensorFlow, an extra: ``make test-tf`` runs them in a venv of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "multiprocess"))
