"""These tests need TensorFlow, an extra: ``make test-tf`` runs them in a venv of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS / "support"), str(_TESTS / "jobs")]
