"""These tests need TensorFlow, an extra: ``make test-tf`` runs them in a venv of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
_ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(_ROOT / name) for name in ("tests/support", "tests/jobs", "verification")]
# The programs of jobs import from there too.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
